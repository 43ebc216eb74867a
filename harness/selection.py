"""Which cases and which implementation a command means."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cases import Case, hidden_cases, load_cases

from .emulation import AUTO, EMULATOR
from .evaluate import Entry
from .implementations import (
    ALIASES,
    BACKENDS,
    CORE,
    LADDER,
    SCOPES,
    Implementation,
    get,
    names,
    peers,
)

SEED_LIMIT = 2**31


@dataclass(frozen=True)
class Subject:
    """What is graded: a submission file, or an implementation by name (and ladder version)."""

    name: str
    backend: str = AUTO
    version: str | None = None

    @property
    def submission(self) -> Path | None:
        """The file, if the name is a path: by its looks, or as it is there and nothing else."""
        path = Path(self.name)
        if path.suffix == ".py" or "/" in self.name:
            return path
        known = (*names(), *ALIASES, LADDER)
        return path if self.name not in known and path.exists() else None

    def implementation(self) -> Implementation:
        """Raises ValueError for an unknown name, for one that cannot run here, or for a file."""
        if self.submission is not None:
            raise ValueError(f"{self.name} is a submission file, not an implementation")
        found = get(self.name, self.backend, self.version)
        missing = found.unavailable()
        if missing:
            raise ValueError(f"{self.name} is not available here: {missing}")
        return found

    def entry(self, scope: str) -> Entry:
        return Entry(self.name, scope, self.version)

    def check(self, scope: str) -> None:
        """Raises ValueError, before anything runs, for what cannot be graded."""
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}, must be one of {', '.join(BACKENDS)}")
        if self.submission is None:
            scopes = self.implementation().scopes
            if scope not in scopes:
                raise ValueError(f"scope is {scope!r}, {self.name} has {', '.join(scopes)}")
        elif self.submission.is_dir():
            raise ValueError(f"submission {self.submission} is a directory, must be a .py file")
        elif not self.submission.is_file():
            raise ValueError(f"submission {self.submission} does not exist")
        elif self.submission.suffix != ".py":
            raise ValueError(f"submission {self.submission} is not named .py")
        elif scope != CORE or self.version:
            raise ValueError("a submission file has no versions, and the core scope only")
        elif self.backend == EMULATOR:
            raise ValueError(f"backend {EMULATOR!r} runs this package's kernels, not a submission")


def draw_seed() -> int:
    return random.SystemRandom().randrange(SEED_LIMIT)


def select_cases(
    wanted: Sequence[str] = (), path: str | Path | None = None, hidden_seed: int | None = None
) -> list[Case]:
    """The cases of a command, in the order asked for.

    Without `wanted` names: those of the file (the public ones if None), or the hidden ones of
    `hidden_seed`. Names are looked up in both. Raises ValueError listing what there is, or for a
    file together with a seed.
    """
    if path is not None and hidden_seed is not None:
        raise ValueError(f"--cases is {path} and --hidden is given; cases come from one of the two")
    listed = load_cases(path)
    hidden = hidden_cases(hidden_seed) if hidden_seed is not None else []
    if not wanted:
        return hidden or listed
    known = {case.name: case for case in [*listed, *hidden]}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no case named {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(wanted)]


def available_peers() -> tuple[list[Implementation], list[str]]:
    """The peers that can run here, and one line about each that cannot."""
    present, absent = [], []
    for peer in peers():
        missing = peer.unavailable()
        if missing:
            absent.append(f"{peer.name} left out: {missing}")
        else:
            present.append(peer)
    return present, absent


def peer_entries(present: Sequence[Implementation]) -> list[Entry]:
    """Every peer in every scope it has, core first."""
    return [Entry(peer.name, scope) for scope in SCOPES for peer in present if scope in peer.scopes]
