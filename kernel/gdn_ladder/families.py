"""The kernel families of the ladder: how each is configured, built, and called.

A version of the ladder is a family plus settings. A setting is a field of the family's config, or a
function of the LadderShape that gives it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

CHUNK = 64
HEAD_DIM = 128
H200_MULTIPROCESSORS = 132  # assumed where there is no GPU: emulator, ahead-of-time compilation


@dataclass(frozen=True)
class LadderShape:
    """What a version may base its choices on."""

    batch: int
    tokens: int
    heads_q: int
    heads_v: int
    use_initial_state: bool = False
    multiprocessors: int = H200_MULTIPROCESSORS


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of one call, laid out as gdn_prefill.gdn_prefill_forward takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g_cumsum: Tensor
    beta: Tensor
    A: Tensor
    initial_state: Tensor | None

    def tensors(self) -> tuple[Tensor, ...]:
        """All but the initial state, in the order that every kernel takes them."""
        return self.q, self.k, self.v, self.g_cumsum, self.beta, self.A


Result = tuple[Tensor, Tensor]
Settings = Mapping[str, Any]


class Buildable(Protocol):
    """A kernel as those see it who compile or emulate it."""

    name: str

    @property
    def pass_configs(self) -> Mapping: ...

    def build(self, config: Any) -> Any:
        """The PrimFunc of a config."""


# From a kernel and its config to the callable that takes the PrimFunc's arguments.
Execute = Callable[[Buildable, Any], Callable[..., Any]]


class Family(Protocol):
    """What a row of the table points to."""

    name: str
    summary: str

    def bind(
        self, settings: Settings, shape: LadderShape, execute: Execute
    ) -> Callable[[Inputs], Result]:
        """Everything that one call and the next of the same shape share; raises ValueError."""


@dataclass(frozen=True)
class Kernel:
    """A family of one kernel with a frozen config.

    module: where config_type, build and PASS_CONFIGS live; imported on first use.
    config_type: name of the frozen config; its fields heads_q, heads_v and use_initial_state are
        filled in from the shape, the others from the version's settings.
    builder: name of the function from the config to a PrimFunc.
    arguments: from the inputs, output and final state to the PrimFunc's arguments.
    """

    name: str
    summary: str
    module: str
    config_type: str
    builder: str
    arguments: Callable[[Inputs, Tensor, Tensor], tuple]

    @property
    def _home(self):
        return import_module(self.module)

    @property
    def pass_configs(self) -> Mapping:
        return self._home.PASS_CONFIGS

    def configure(self, settings: Settings, shape: LadderShape) -> Any:
        """The frozen config of a version for a shape. Raises ValueError where it has none."""
        fields = {
            "heads_q": shape.heads_q,
            "heads_v": shape.heads_v,
            "use_initial_state": shape.use_initial_state,
        }
        return getattr(self._home, self.config_type)(**{**fields, **resolve(settings, shape)})

    def build(self, config) -> Any:
        """The PrimFunc of a config."""
        return getattr(self._home, self.builder)(config)

    def bind(
        self, settings: Settings, shape: LadderShape, execute: Execute
    ) -> Callable[[Inputs], Result]:
        launch = execute(self, self.configure(settings, shape))

        def call(inputs: Inputs) -> Result:
            output, final_state = allocate(inputs)
            launch(*self.arguments(inputs, output, final_state))
            return output, final_state

        return call


@dataclass(frozen=True)
class PackageKernel:
    """A kernel of the package's core, as gdn_prefill.core names it."""

    name: str
    factory: Callable[[Any], Any]
    pass_configs: Mapping = field(hash=False, compare=False)

    def build(self, config) -> Any:
        return self.factory(config)


@dataclass(frozen=True)
class PackageCore:
    """The package's core as its dispatch plans it; settings are options of core_plan."""

    name: str = "core"
    summary: str = "the shipped kernels: register-resident, split over time where the plan says so"

    def bind(
        self, settings: Settings, shape: LadderShape, execute: Execute
    ) -> Callable[[Inputs], Result]:
        from gdn_prefill.core import Core, core_kernels

        plan = self.plan(settings, shape)
        kernels = core_kernels(plan, shape.heads_q, shape.heads_v, shape.use_initial_state)
        core = Core(
            plan,
            {
                launch: execute(
                    PackageKernel(kernel.name, kernel.factory, kernel.pass_configs), kernel.config
                )
                for launch, kernel in kernels.items()
            },
        )
        workspaces = plan.workspaces(shape.batch, shape.heads_v)

        def call(inputs: Inputs) -> Result:
            output, final_state = allocate(inputs)
            place = {"device": output.device}
            temporaries = {
                name: torch.empty(item.shape, dtype=getattr(torch, item.dtype), **place)
                for name, item in workspaces.items()
            }
            initial = _or_dummy(inputs.initial_state, output)
            core(inputs.tensors(), initial, output, final_state, HEAD_DIM**-0.5, temporaries)
            return output, final_state

        return call

    def plan(self, settings: Settings, shape: LadderShape):
        """The gdn_prefill.split.CorePlan of a shape."""
        from gdn_prefill.dispatch import core_plan

        sizes = shape.batch, shape.tokens, shape.heads_q, shape.heads_v
        return core_plan(*sizes, shape.multiprocessors, **resolve(settings, shape))


@dataclass(frozen=True)
class PackageRuntime:
    """The four-group kernel behind the package's call layer: its caches, its CUDA Graphs."""

    name: str = "runtime"
    summary: str = "the four-group kernel behind the package's caches"

    def bind(
        self, settings: Settings, shape: LadderShape, execute: Execute
    ) -> Callable[[Inputs], Result]:
        """`execute` has no say here: what is shown is the package's way of launching."""
        from .cached import CACHED

        options = resolve(settings, shape)

        def call(inputs: Inputs) -> Result:
            return CACHED.call((*inputs.tensors(), inputs.initial_state), options["block_dv"])

        return call


def resolve(settings: Settings, shape: LadderShape) -> dict[str, Any]:
    """Settings with every rule replaced by what it gives for the shape."""
    return {field: value(shape) if callable(value) else value for field, value in settings.items()}


def allocate(inputs: Inputs) -> Result:
    """Checks the inputs, then makes an output and a final state for them."""
    from gdn_prefill.validation import check_forward

    shape = check_forward(*inputs.tensors(), inputs.initial_state)
    device = inputs.q.device
    return (
        torch.empty(shape.output, dtype=torch.bfloat16, device=device),
        torch.empty(shape.state, dtype=torch.float32, device=device),
    )


def _ladder_arguments(inputs: Inputs, output: Tensor, final_state: Tensor) -> tuple:
    # The final state's shape stands for an absent initial state, which is never read.
    initial = final_state if inputs.initial_state is None else inputs.initial_state
    return (*inputs.tensors(), initial, output, final_state)


def _unsegmented_arguments(inputs: Inputs, output: Tensor, final_state: Tensor) -> tuple:
    chunks = -(-inputs.q.shape[1] // CHUNK)
    return (*_ladder_arguments(inputs, output, final_state), 1, chunks)


def _forward_arguments(inputs: Inputs, output: Tensor, final_state: Tensor) -> tuple:
    initial = _or_dummy(inputs.initial_state, output)
    return (*inputs.tensors(), initial, output, final_state, HEAD_DIM**-0.5)


def _or_dummy(initial_state: Tensor | None, output: Tensor) -> Tensor:
    """What kernels built without an initial state take in its place."""
    if initial_state is None:
        return torch.empty(1, dtype=torch.float32, device=output.device)
    return initial_state


EARLY = Kernel(
    name="early",
    summary="one or two computing warp groups, U and W formed, seven GEMMs in a row",
    module="gdn_ladder.early",
    config_type="EarlyConfig",
    builder="early_kernel",
    arguments=_ladder_arguments,
)
FOUR_GROUP = Kernel(
    name="four_group",
    summary="the four-group kernel: state, V, O and producer warp groups",
    module="gdn_ladder.four_group",
    config_type="ForwardConfig",
    builder="forward_kernel",
    arguments=_forward_arguments,
)
VARIANT = Kernel(
    name="variant",
    summary="four warp groups; v7's structure with one thing changed",
    module="gdn_ladder.four_group_variants",
    config_type="FourGroupConfig",
    builder="four_group_kernel",
    arguments=_unsegmented_arguments,
)
INT8 = Kernel(
    name="int8",
    summary="one computing warp group, six int8 GEMMs in a row",
    module="gdn_ladder.int8",
    config_type="Int8Config",
    builder="int8_kernel",
    arguments=_ladder_arguments,
)
PREPARED_GROUPS = Kernel(
    name="prepared_groups",
    summary="register-resident, the chain's factors made ahead; five warp groups",
    module="gdn_ladder.prepared_groups",
    config_type="GroupsConfig",
    builder="groups_kernel",
    arguments=_forward_arguments,
)
PREPARED_FUSED = Kernel(
    name="prepared_fused",
    summary="the same in four warp groups, the chain's makes the output too",
    module="gdn_ladder.prepared_fused",
    config_type="FusedConfig",
    builder="fused_kernel",
    arguments=_forward_arguments,
)
PREPARED_WIDE = Kernel(
    name="prepared_wide",
    summary="the same over all 128 state columns, two state groups and one that prepares",
    module="gdn_ladder.prepared_wide",
    config_type="WideConfig",
    builder="wide_kernel",
    arguments=_forward_arguments,
)
RUNTIME = PackageRuntime()
CORE = PackageCore()
