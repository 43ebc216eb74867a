"""The kernel families of the ladder: how each is configured, built, and called.

A version of the ladder is a family plus settings. A setting is a field of the family's config, or a
function of the LadderShape that gives it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

HEAD_DIM = 128
H200_MULTIPROCESSORS = 132  # assumed where there is no GPU: emulator, ahead-of-time compilation

Execute = Callable[[Any, Mapping], Callable[..., Any]]


@dataclass(frozen=True)
class LadderShape:
    """What a version may base its choices on."""

    batch: int
    tokens: int
    heads_q: int
    heads_v: int
    use_initial_state: bool = False
    multiprocessors: int = H200_MULTIPROCESSORS


@dataclass(frozen=True)
class Call:
    """The tensors of one call; the outputs are allocated already."""

    q: Tensor
    k: Tensor
    v: Tensor
    g_cumsum: Tensor
    beta: Tensor
    A: Tensor
    initial_state: Tensor | None
    output: Tensor
    final_state: Tensor


@dataclass(frozen=True)
class Family:
    """One kernel and its frozen config.

    module: where config_type, kernel and PASS_CONFIGS live; imported on first use.
    config_type: name of the frozen config; its fields heads_q, heads_v and use_initial_state are
        filled in from the shape, the others from the version's settings.
    kernel: name of the function from the config to a PrimFunc.
    arguments: from a Call to the PrimFunc's arguments.
    """

    name: str
    summary: str
    module: str
    config_type: str
    kernel: str
    arguments: Callable[[Call], tuple]

    @property
    def _home(self):
        return import_module(self.module)

    def configure(self, settings: Mapping[str, Any], shape: LadderShape):
        """The frozen config of a version for a shape. Raises ValueError where it has none."""
        resolved = {
            field: value(shape) if callable(value) else value for field, value in settings.items()
        }
        return getattr(self._home, self.config_type)(
            heads_q=shape.heads_q,
            heads_v=shape.heads_v,
            use_initial_state=shape.use_initial_state,
            **resolved,
        )

    def build(self, config):
        """The PrimFunc of a config."""
        return getattr(self._home, self.kernel)(config)

    @property
    def pass_configs(self) -> Mapping:
        return self._home.PASS_CONFIGS

    def run(self, settings: Mapping[str, Any], shape: LadderShape, call: Call, execute) -> None:
        """Fill the call's outputs. execute(family, config) gives the callable to launch."""
        execute(self, self.configure(settings, shape))(*self.arguments(call))


def _early_arguments(call: Call) -> tuple:
    # The state's shape stands for the absent initial state, which is never read.
    initial = call.final_state if call.initial_state is None else call.initial_state
    return (*_inputs(call), initial, call.output, call.final_state)


def _forward_arguments(call: Call) -> tuple:
    absent = torch.empty(1, dtype=torch.float32, device=call.q.device)
    initial = absent if call.initial_state is None else call.initial_state
    return (*_inputs(call), initial, call.output, call.final_state, HEAD_DIM**-0.5)


def _inputs(call: Call) -> tuple:
    return call.q, call.k, call.v, call.g_cumsum, call.beta, call.A


EARLY = Family(
    name="early",
    summary="one or two computing warp groups, U and W formed, seven GEMMs in a row",
    module="gdn_ladder.early",
    config_type="EarlyConfig",
    kernel="early_kernel",
    arguments=_early_arguments,
)
FORWARD = Family(
    name="forward",
    summary="the shipped four-group kernel: state, V, O and producer warp groups",
    module="gdn_prefill.kernels.forward",
    config_type="ForwardConfig",
    kernel="forward_kernel",
    arguments=_forward_arguments,
)
