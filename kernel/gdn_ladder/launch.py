"""Running a version by name, with the compiled kernels kept for the next call."""

import functools
from typing import Any

import torch
from torch import Tensor

from .families import Buildable, Execute, Inputs, LadderShape
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


def kernels_of(version: str, shape: LadderShape) -> list[tuple[Buildable, Any]]:
    """The kernels, each with its config, that the version launches for a shape, in that order.

    v14 launches by the package's runtime and has none here. Raises as forward() does.
    """
    found = []
    _row(version).family.bind(_row(version).settings, shape, lambda *launch: found.append(launch))
    return found


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
    execute: Execute | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one version of the ladder; arguments and results as gdn_prefill.gdn_prefill_forward.

    A kernel is compiled on the first call that needs it and kept. `execute` replaces compiling and
    launching: from a families.Buildable and its config it gives the callable that takes the
    PrimFunc's arguments, such as an emulator of it.

    Returns (output [B, T, Hv, 128] bf16, final_state [B, Hv, 128, 128] fp32), freshly allocated but
    for v14, which reuses its own. Raises ValueError for an unknown version, NotBuiltError for one
    that no kernel runs yet, TypeError or ValueError for a wrong tensor.
    """
    row = _row(version)
    inputs = Inputs(q, k, v, g_cumsum, beta, A, initial_state)
    shape = _shape(inputs)
    if execute is None:
        if not q.is_cuda:
            raise ValueError(
                f"q is on {q.device}: version {version!r} runs on a Hopper GPU, or by an `execute`"
            )
        return _bound(row.name, shape)(inputs)
    return row.family.bind(row.settings, shape, execute)(inputs)


def _row(name: str) -> Version:
    row = get_version(name)
    if row.family is None:
        raise NotBuiltError(
            f"version {name!r} is not built yet, available are {', '.join(available_versions())}"
        )
    return row


def _shape(inputs: Inputs) -> LadderShape:
    try:
        batch, tokens, heads_q, _ = inputs.q.shape
        heads_v = inputs.v.shape[2]
        on_gpu = inputs.q.is_cuda
    except (AttributeError, IndexError, ValueError):
        from gdn_prefill.validation import check_forward

        check_forward(*inputs.tensors(), inputs.initial_state)
        raise
    has_state = inputs.initial_state is not None
    if not on_gpu:
        return LadderShape(batch, tokens, heads_q, heads_v, has_state)
    multiprocessors = _multiprocessors(inputs.q.device)
    return LadderShape(batch, tokens, heads_q, heads_v, has_state, multiprocessors)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=256)
def _bound(name: str, shape: LadderShape) -> Any:
    row = BY_NAME[name]
    return row.family.bind(row.settings, shape, _compiled)


@functools.cache
def _compiled(kernel: Buildable, config) -> Any:
    from gdn_prefill.runtime import compile_launcher

    return compile_launcher(kernel.build(config), kernel.pass_configs)
