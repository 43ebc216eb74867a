"""The version table: one row an idea, in the order of the story; winners and losers alike.

`lesson` and `source_ms` are the findings of the course report that this ladder retraces, measured
there on a slice of an H800 with 14 multiprocessors; what this repository measured is in results/.
Numbers that the report skips (v8, v12, v13, v16 to v19) do not exist. The rows behind w8a8 go
beyond that report, and their lessons are this repository's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gdn_prefill.dispatch import select_block_dv

from .families import (
    CORE,
    EARLY,
    FOUR_GROUP,
    HEAD_DIM,
    INT8,
    PREPARED_FUSED,
    PREPARED_GROUPS,
    PREPARED_WIDE,
    RUNTIME,
    VARIANT,
    Family,
    LadderShape,
)
from .segments import CHUNK_PARALLEL_SCAN, split_time


@dataclass(frozen=True)
class Version:
    """A row of the ladder.

    name: as the source names it.
    idea: the one thing that sets it apart from the row it starts from.
    lesson: what the source found, or this repository where origin is "here".
    family: the kernel that runs it; None while no kernel does.
    settings: fields of the family's config (of the call, for the runtime), each a value or a
        function of the LadderShape.
    expected: "pass", or "fail" for an idea kept to show why it is wrong; `reason` says why then.
    source_ms: the source's core time by case, in ms.
    origin: whose idea it is: the source's, or this repository's.
    """

    name: str
    idea: str
    lesson: str
    family: Family | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    expected: Literal["pass", "fail"] = "pass"
    reason: str = ""
    source_ms: Mapping[str, float] = field(default_factory=dict)
    origin: Literal["source", "here"] = "source"

    def __post_init__(self) -> None:
        if (self.expected == "fail") != bool(self.reason):
            raise ValueError(
                f"{self.name}: a reason belongs to an expected failure and to no other"
            )

    def settings_text(self) -> str:
        """The settings on one line; a rule by its name."""
        return ", ".join(f"{key}={_shown(value)}" for key, value in self.settings.items())


def _shown(value: Any) -> str:
    return value.__name__ if callable(value) else str(value)


def fills_half_the_gpu(shape: LadderShape) -> int:
    """v5's block_dv: 32 where CTAs of whole heads fill less than half the GPU, else 128."""
    return 32 if shape.batch * shape.heads_v < shape.multiprocessors / 2 else HEAD_DIM


def gva_aware(shape: LadderShape) -> int:
    """v7's block_dv: 64 without GVA, else 128."""
    return select_block_dv(shape.heads_v, shape.heads_q)


# Microseconds a chunk of the four-group kernel by tile, one CTA a multiprocessor, on an H200.
CHUNK_US = {32: 1.31, 64: 1.76, 128: 2.65}


def soonest(shape: LadderShape) -> int:
    """The block_dv that is through first: waves of CTAs times a chunk's time, ties to the wider."""

    def time(tile: int) -> float:
        ctas = shape.batch * shape.heads_v * (HEAD_DIM // tile)
        return -(-ctas // shape.multiprocessors) * CHUNK_US[tile]

    return min(sorted(CHUNK_US, reverse=True), key=time)


VERSIONS: tuple[Version, ...] = (
    Version(
        "v1",
        idea="every matrix product a tensor-core GEMM; element-wise loads, nothing overlapped",
        lesson="an order of magnitude over scalar loops; 16 us a chunk, mostly waiting for memory",
        family=EARLY,
        settings={"loads": "elementwise", "block_dv": 32},
        source_ms={"long_low_gva": 8.545},
    ),
    Version(
        "v2",
        idea="TMA loads in a warp group of their own, block_dv 128",
        lesson="long cases gain; one CTA a head leaves chain_equal with too few CTAs",
        family=EARLY,
        settings={"loads": "tma", "block_dv": 128},
        source_ms={"long_low_gva": 6.226, "chain_equal": 1.624},
    ),
    Version(
        "v2b",
        idea="v2 with block_dv 32",
        lesson="chain_equal gains from four times the CTAs, long_low_gva pays for redundant W",
        family=EARLY,
        settings={"loads": "tma", "block_dv": 32},
        source_ms={"long_low_gva": 6.946, "chain_equal": 0.986},
    ),
    Version(
        "v3",
        idea="v2b with Q and K double-buffered",
        lesson="slower in all four observed cases, 4 % on long_low_gva: nothing was overlapped",
        family=EARLY,
        settings={"loads": "tma", "block_dv": 32, "qk_stages": 2},
    ),
    Version(
        "v4",
        idea="FlashQLA's convention, gate and beta multiplied into A by the kernel; the course's A",
        lesson="compiles and is wrong: largest output error about 7e-3",
        family=VARIANT,
        settings={"block_dv": gva_aware, "a_holds_gate": False},
        expected="fail",
        reason="the course's A holds the gate ratios already, so they are applied twice",
    ),
    Version(
        "v5",
        idea="block_dv 32 only where whole heads fill less than half the multiprocessors, else 128",
        lesson="public mean score 73 to 77 without losing a long case",
        family=EARLY,
        settings={"loads": "tma", "block_dv": fills_half_the_gpu},
    ),
    Version(
        "v6",
        idea="warp specialisation in four groups; V_new = A W', one GEMM fewer; block_dv 128",
        lesson="the big jump: the structure, not a tuned constant",
        family=FOUR_GROUP,
        settings={"block_dv": 128},
    ),
    Version(
        "v7",
        idea="v6 with block_dv 64 where every V head has its own q/k head, else 128",
        lesson="settles the small grids; wide and deep cases stay where they were",
        family=FOUR_GROUP,
        settings={"block_dv": gva_aware},
        source_ms={"chain_equal": 0.282, "long_low_gva": 1.477},
    ),
    Version(
        "v9",
        idea="v7 without the two barriers that hold back the next chunk's writes",
        lesson="NaN: iterations race",
        family=VARIANT,
        settings={"block_dv": gva_aware, "guards": False},
        expected="fail",
        reason="bf16 state and V_new are overwritten while they are read; it may also hang",
    ),
    Version(
        "v9.5",
        idea="v7 without the write-back warp: the O group stores its output element by element",
        lesson="right, but long_low_gva 41 % slower in the text, 2.1x in the figure",
        family=VARIANT,
        settings={"block_dv": gva_aware, "output": "direct"},
    ),
    Version(
        "v10",
        idea="v7 with g and beta of all heads (32 at most) in one TMA box each, not by column",
        lesson="more shared memory and a fixed cost a chunk: wide_gva_state 42 % slower",
        family=VARIANT,
        settings={"block_dv": gva_aware, "gates": "box"},
    ),
    Version(
        "v11",
        idea="v10 with plain row loads in place of TMA",
        lesson="as v10; the source names the two together and does not tell them apart",
        family=VARIANT,
        settings={"block_dv": gva_aware, "gates": "rows"},
    ),
    Version(
        "v14",
        idea="v7 behind the runtime's kernel, buffer and CUDA Graph caches",
        lesson="short calls gain most; public score 112.07, hidden 116.16",
        family=RUNTIME,
        settings={"block_dv": gva_aware},
        source_ms={"short_tail_state": 0.067},
    ),
    Version(
        "v15",
        idea="v7 with three stages for K",
        lesson="within 1.6 %, noise: one more barrier round costs what the distance gains",
        family=VARIANT,
        settings={"block_dv": gva_aware, "k_stages": 3},
    ),
    Version(
        "v20",
        idea="two CTAs a multiprocessor: one computing group does all six GEMMs in series",
        lesson="about 2.7x slower than v14",
        family=EARLY,
        settings={
            "loads": "tma",
            "block_dv": 64,
            "forms_w": False,
            "registers": (208, 40),
            "ctas_per_multiprocessor": 2,
        },
    ),
    Version(
        "v21",
        idea="two CTAs a multiprocessor: four groups squeezed into 64 registers a thread",
        lesson="about 2.7x slower than v14, and it spills",
        family=VARIANT,
        settings={
            "block_dv": 64,
            "stages": 1,
            "k_stages": 1,
            "registers": None,
            "ctas_per_multiprocessor": 2,
        },
    ),
    Version(
        "scan",
        idea="chunk-parallel scan: segments summarised as affine maps, scanned, then replayed",
        lesson="right, no gain on 14 multiprocessors: two passes cost what the parallelism gives",
        family=CHUNK_PARALLEL_SCAN,
        settings={"block_dv": gva_aware, "split": split_time},
    ),
    Version(
        "w8a8",
        idea="int8 operands, scaled by row, in every GEMM",
        lesson="compiles; the errors of K, V and A add up in the state",
        family=INT8,
        expected="fail",
        reason="eight bits leave errors above 1e-2 in the state, the tolerance is 5e-3",
    ),
    Version(
        "four_group",
        idea="v7's kernel with the tile that is through first on the multiprocessors there are",
        lesson="few states: the narrowest tile; the chain through shared memory is the limit",
        family=FOUR_GROUP,
        settings={"block_dv": soonest},
        origin="here",
    ),
    Version(
        "resident",
        idea="state, W' and V_new stay in registers, transposed; scores in a group of their own",
        lesson="the chain loses its trips through shared memory; its queue is the limit now",
        family=CORE,
        settings={"split": False},
        origin="here",
    ),
    Version(
        "prepared_groups",
        idea="resident with gates and beta multiplied into A ahead: no factors on the chain",
        lesson="a fifth group's traffic; shared memory, which bounds resident, is asked for more",
        family=PREPARED_GROUPS,
        origin="here",
    ),
    Version(
        "prepared_fused",
        idea="prepared_groups with the output made by the state group, nothing of it published",
        lesson="the least traffic, but one group issues nearly every product, in order: not faster",
        family=PREPARED_FUSED,
        origin="here",
    ),
    Version(
        "prepared_wide",
        idea="prepared_fused over all 128 columns: two state groups share what is made ahead",
        lesson="one group converts while the other multiplies: what resident is at 128 columns now",
        family=PREPARED_WIDE,
        origin="here",
    ),
)

BY_NAME: Mapping[str, Version] = {version.name: version for version in VERSIONS}
