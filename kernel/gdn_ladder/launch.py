"""Running a version: validation, allocation, and the compiled kernels kept for the next call."""

import functools
from typing import Any

import torch
from torch import Tensor

from .families import Call, Family, LadderShape
from .versions import BY_NAME, VERSIONS, Version


class NotBuiltError(NotImplementedError):
    """The version is a row of the table that no kernel runs yet."""


def available_versions() -> tuple[str, ...]:
    """The versions that forward() can run, in the order of the table."""
    return tuple(version.name for version in VERSIONS if version.family is not None)


def get_version(name: str) -> Version:
    """The row called `name`. Raises ValueError naming the rows that exist."""
    if name not in BY_NAME:
        raise ValueError(f"version {name!r} does not exist, allowed are {', '.join(BY_NAME)}")
    return BY_NAME[name]


def forward(
    version: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cumsum: Tensor,
    beta: Tensor,
    A: Tensor,
    initial_state: Tensor | None = None,
    *,
    execute: Any = None,
) -> tuple[Tensor, Tensor]:
    """Run one version of the ladder; arguments and results as gdn_prefill.gdn_prefill_forward.

    The kernel is compiled on the first call of a specialisation and kept. execute(family, config)
    replaces that: it gives the callable that takes the PrimFunc's arguments, such as an emulator.

    Returns (output [B, T, Hv, 128] bf16, final_state [B, Hv, 128, 128] fp32), freshly allocated.
    Raises ValueError for an unknown version, NotBuiltError for one that no kernel runs yet, and
    TypeError or ValueError for a wrong tensor.
    """
    from gdn_prefill.validation import check_forward

    row = get_version(version)
    if row.family is None:
        raise NotBuiltError(
            f"version {version!r} is not built yet, available are {', '.join(available_versions())}"
        )
    checked = check_forward(q, k, v, g_cumsum, beta, A, initial_state)
    batch, tokens, heads_q, _ = q.shape
    shape = LadderShape(
        batch,
        tokens,
        heads_q,
        v.shape[2],
        initial_state is not None,
        **({"multiprocessors": _multiprocessors(q.device)} if q.is_cuda else {}),
    )
    output = torch.empty_like(v)
    final_state = torch.empty(checked.state, dtype=torch.float32, device=q.device)
    call = Call(q, k, v, g_cumsum, beta, A, initial_state, output, final_state)
    row.family.run(row.settings, shape, call, execute or _compiled)
    return output, final_state


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _compiled(family: Family, config) -> Any:
    from gdn_prefill.runtime import compile_launcher

    return compile_launcher(family.build(config), family.pass_configs)
