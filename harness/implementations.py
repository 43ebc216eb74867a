"""The implementations that can be timed, by name: this package's, its ladder's, the peers'.

A name is one of names(), or "package.module:ATTRIBUTE" for an Implementation of one's own.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .emulation import AUTO, CUDA, EMULATOR, TORCH, Emulation, preparing_backend, shipped_forward
from .operator_calls import fresh, planned
from .problem import Problem

CORE = "core"
FULL = "full"
SCOPES = (CORE, FULL)
BACKENDS = (AUTO, CUDA, TORCH, EMULATOR)
OURS = "gdn_prefill"
# Fresh output tensors on every call, as a caller gets by default.
OURS_FRESH = "gdn_prefill_fresh"
# The full forward as the lab has it: prepare, then its entry, with a fresh A on every call.
OURS_LAB = "gdn_prefill_lab"
LADDER = "gdn_ladder"
# What a release of this package ran by default, where that is a version of the ladder by now.
FORMERLY_SHIPPED = {"0.1.0": "four_group"}
# This project's own names: never a peer of themselves.
OWN = (OURS, OURS_FRESH, OURS_LAB, LADDER)
ALIASES = {"ours": OURS}
PEERS = ("flash_qla", "fla", "flashinfer")

Call = Callable[[], tuple[Tensor, Tensor]]


@runtime_checkable
class Implementation(Protocol):
    """Something that computes the operator.

    name and version end up in the recorded rows; scopes lists what bind() accepts. One that keeps
    count of its compiled kernels may have compiles() -> int: the count must not move while timed.
    """

    name: str
    version: str
    scopes: tuple[str, ...]
    backend: str

    def unavailable(self) -> str | None:
        """Why it cannot run here (package missing, no GPU), in words; None if it can."""

    def bind(self, problem: Problem, scope: str) -> Call:
        """Everything that happens outside the timed region; the returned call is what is timed.

        It takes no arguments and gives (output [B, T, Hv, 128], final state [B, Hv, 128, 128]).
        """


@dataclass(frozen=True)
class Ours:
    """This package: core is the lab's entry from a ready-made A, full the operator.

    operator: False makes full the lab's way, prepare and then its entry. Emulated it always is, as
    the operator's kernels are not emulated from here.
    """

    name: str = OURS
    reuse_outputs: bool = True
    operator: bool = True
    backend: str = AUTO
    scopes: tuple[str, ...] = SCOPES
    emulation: Emulation = field(default_factory=Emulation)

    @property
    def version(self) -> str:
        from gdn_prefill import __version__

        return __version__

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("gdn_prefill") is None:
            return "the package gdn_prefill is not importable (pip install -e . or PYTHONPATH)"
        if self.backend == CUDA and not torch.cuda.is_available():
            return "backend 'cuda' needs a GPU, and torch sees none"
        return None

    def compiles(self) -> int:
        from gdn_prefill import cache_info

        return cache_info().compiles

    def bind(self, problem: Problem, scope: str) -> Call:
        from gdn_prefill import gdn_prefill_forward, prepare

        inputs = problem.inputs
        if self.backend == EMULATOR:
            return self._bind_emulated(problem, scope)
        options = {"backend": self.backend, "reuse_outputs": self.reuse_outputs}

        def core() -> tuple[Tensor, Tensor]:
            return gdn_prefill_forward(
                inputs.q,
                inputs.k,
                inputs.v,
                problem.g_cumsum,
                inputs.beta,
                problem.A,
                inputs.initial_state,
                **options,
            )

        def lab() -> tuple[Tensor, Tensor]:
            g_cumsum, A = prepare(inputs.k, inputs.g, inputs.beta, backend=self.backend)
            return gdn_prefill_forward(
                inputs.q,
                inputs.k,
                inputs.v,
                g_cumsum,
                inputs.beta,
                A,
                inputs.initial_state,
                **options,
            )

        if check_scope(self, scope) == CORE:
            return core
        if not self.operator:
            if problem.lengths:
                raise ValueError(f"{self.name} has no packed sequences")
            return lab
        return (planned if self.reuse_outputs else fresh)(problem, self.backend)

    def _bind_emulated(self, problem: Problem, scope: str) -> Call:
        from gdn_prefill import prepare

        inputs, forward = problem.inputs, shipped_forward(problem, self.emulation)

        def core() -> tuple[Tensor, Tensor]:
            return forward(problem.g_cumsum, problem.A)

        def full() -> tuple[Tensor, Tensor]:
            backend = preparing_backend(self.backend)
            return forward(*prepare(inputs.k, inputs.g, inputs.beta, backend=backend))

        return {CORE: core, FULL: full}[check_scope(self, scope)]


_OURS = {
    ours.name: ours
    for ours in (
        Ours(),
        Ours(OURS_FRESH, reuse_outputs=False),
        Ours(OURS_LAB, operator=False, scopes=(FULL,)),
    )
}


@dataclass(frozen=True)
class Ladder:
    """A version of the kernel's history; core only."""

    version: str
    name: str = LADDER
    backend: str = AUTO
    scopes: tuple[str, ...] = (CORE,)
    emulation: Emulation = field(default_factory=Emulation)

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("gdn_ladder") is None:
            return "the package gdn_ladder is not importable (pip install -e . or PYTHONPATH)"
        without = not torch.cuda.is_available()
        if self.backend == EMULATOR or (self.backend == AUTO and without):
            from gdn_ladder import get_version
            from gdn_ladder.families import PackageRuntime

            if isinstance(get_version(self.version).family, PackageRuntime):
                return f"{self.version} is the package's way of launching a kernel, it needs a GPU"
        elif without:
            return (
                "the ladder's kernels need a GPU, and torch sees none (--backend emulator runs"
                " them without)"
            )
        return None

    def bind(self, problem: Problem, scope: str) -> Call:
        from gdn_ladder import forward, get_version

        check_scope(self, scope)
        inputs = problem.inputs
        execute = None
        if self.backend == EMULATOR:
            expected = get_version(self.version).expected
            execute = self.emulation.for_version(expected).execute

        def core() -> tuple[Tensor, Tensor]:
            return forward(
                self.version,
                inputs.q,
                inputs.k,
                inputs.v,
                problem.g_cumsum,
                inputs.beta,
                problem.A,
                inputs.initial_state,
                execute=execute,
            )

        return core


def check_scope(implementation: Implementation, scope: str) -> str:
    """Returns `scope`, or raises ValueError if the implementation has no such scope."""
    if scope not in implementation.scopes:
        raise ValueError(
            f"scope is {scope!r}, {implementation.name} has {', '.join(implementation.scopes)}"
        )
    return scope


def ladder_versions() -> tuple[str, ...]:
    """The ladder's runnable versions, in their order."""
    from gdn_ladder import available_versions

    return available_versions()


def peers() -> tuple[Implementation, ...]:
    """Every peer's implementations, its default one first; available here or not."""
    found: list[Implementation] = []
    for name in PEERS:
        found.extend(importlib.import_module(f"reference.peers.{name}").IMPLEMENTATIONS)
    return tuple(found)


def names() -> tuple[str, ...]:
    """The names get() takes, aliases left out."""
    return (*_OURS, *(peer.name for peer in peers()))


def get(
    name: str,
    backend: str = AUTO,
    version: str | None = None,
    emulation: Emulation | None = None,
) -> Implementation:
    """Finds an implementation.

    `backend` chooses among this package's backends, `emulation` says how "emulator" goes about it;
    `version` asks for that version of the ladder in the package's place. Raises ValueError naming
    what is allowed.
    """
    name = ALIASES.get(name, name)
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")
    emulation = emulation or Emulation()
    if version is not None:
        found = _ladder(name, version)
        if backend == TORCH:
            raise ValueError(f"backend is {TORCH!r}, a version of the ladder has none of that kind")
        return replace(found, backend=backend, emulation=emulation)
    if name in _OURS:
        return replace(_OURS[name], backend=backend, emulation=emulation)
    if ":" in name:
        return _imported(name)
    for peer in peers():
        if peer.name == name:
            if backend == EMULATOR:
                raise ValueError(f"backend {EMULATOR!r} runs this package's kernels, not {name}")
            return peer
    raise ValueError(
        f"implementation is {name!r}, must be one of {', '.join(names())}, 'package.module:NAME'"
        " or the path of a submission file"
    )


def _ladder(name: str, version: str) -> Ladder:
    if name not in (OURS, LADDER):
        raise ValueError(f"version {version!r} is of this package's ladder, not of {name}")
    known = ladder_versions()
    if version not in known:
        raise ValueError(f"version is {version!r}, must be one of {', '.join(known)}")
    return Ladder(version)


def _imported(name: str) -> Implementation:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"implementation {name!r} cannot be imported: {error}") from None
    if not isinstance(found, Implementation):
        raise ValueError(f"{name!r} is a {type(found).__name__}, not an Implementation")
    return found
