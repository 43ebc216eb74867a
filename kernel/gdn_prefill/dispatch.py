"""Every choice the package makes, as pure functions of shapes and facts about the device."""

from __future__ import annotations

from collections.abc import Iterable

from .cost import CoreCall, CostModel, packaged_model
from .split import HEAD_DIM, CorePlan, SegmentPlan, plan_segments

BACKENDS = ("auto", "cuda", "torch")
HOPPER = (9, 0)

# State columns of one CTA of the shipped kernel.
TILES = (64, 128)

# bf16 products of a scan step: D S alone. What is left out is of the size of the rounding that the
# forward kernel does in every chunk.
PRODUCTS = 1
# A split is taken where the model expects at least this share of the time to be saved.
SPLIT_MARGIN = 0.04
# A split does the work about twice over. From a third of the SMs on (three segments begin with
# three CTAs a state at 128 columns) the unsplit kernel keeps enough of them busy.
SPLIT_SHARE = 3
# Numbers of segments that are tried, beside those that fill one or two waves of a launch exactly.
SEGMENTS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FILLED_WAVES = (1, 2)
# Grid extents beyond the first are 16-bit: sequences and segments are such extents.
MAX_GRID = 65535


def core_plan(
    sequences: int,
    tokens: int,
    heads_q: int,
    heads_v: int,
    sm_count: int,
    *,
    block_dv: int | None = None,
    split: str | bool | int = "auto",
    products: int = PRODUCTS,
    model: CostModel | None = None,
) -> CorePlan:
    """The fastest way to run the core, by the cost model; pure, so the same wherever it is asked.

    sequences, tokens: B and T, or N and the mean length of packed sequences (see CoreCall).
    sm_count: SMs of the device. block_dv: state columns of one CTA of the forward launch, 64 or
    128; None: the faster. split: False never splits, True always, a number asks for that many
    segments of equal length (fewer where whole chunks do not come out even), "auto" splits where
    it saves at least SPLIT_MARGIN. products: of the scan, 1, 2 or 3. model: constants to go by,
    the packaged ones by default.

    Raises TypeError or ValueError for sizes, options or segments that cannot be.
    """
    call = CoreCall(sequences, tokens, heads_q, heads_v)
    check_split(split)
    if sm_count < 1:
        raise ValueError(f"sm_count={sm_count} must be at least 1")
    if block_dv is not None and (type(block_dv) is not int or block_dv not in TILES):
        raise ValueError(f"block_dv={block_dv!r} must be one of {TILES}, or None")
    tiles = TILES if block_dv is None else (block_dv,)
    model = model or packaged_model()

    def fastest(plans: Iterable[CorePlan]) -> CorePlan:
        return min(plans, key=lambda plan: model.predict(plan, call, sm_count))

    if split is False:
        return fastest(_unsplit(tiles))
    if split == "auto":
        plain, *_ = plans = [fastest(_unsplit(tiles))]
        plans += _split(_auto_cuts(call, sm_count), tiles, products)
        best = fastest(plans)
        limit = (1 - SPLIT_MARGIN) * model.predict(plain, call, sm_count)
        return best if model.predict(best, call, sm_count) <= limit else plain
    _check_cut(split, call)
    cuts = _cuts(call, sm_count) if split is True else [plan_segments(tokens, split)]
    return fastest(_split(cuts, tiles, products))


def candidates(call: CoreCall, sm_count: int, products: int = PRODUCTS) -> list[CorePlan]:
    """Every plan that core_plan weighs for a call with split="auto", the unsplit ones first."""
    return [*_unsplit(TILES), *_split(_auto_cuts(call, sm_count), TILES, products)]


def _unsplit(tiles: Iterable[int]) -> list[CorePlan]:
    return [CorePlan(tile) for tile in tiles]


def _split(cuts: Iterable[SegmentPlan], tiles: Iterable[int], products: int) -> list[CorePlan]:
    return [CorePlan(tile, cut, products) for cut in cuts for tile in tiles]


def _auto_cuts(call: CoreCall, sm_count: int) -> list[SegmentPlan]:
    return _cuts(call, sm_count) if SPLIT_SHARE * call.states <= sm_count else []


def _cuts(call: CoreCall, sm_count: int) -> list[SegmentPlan]:
    """The cuts worth weighing, the longest segments first: round numbers and full waves."""
    counts = set(SEGMENTS)
    for waves in FILLED_WAVES:
        room = waves * sm_count // call.states  # CTAs of one state
        for tile in TILES:
            slices = HEAD_DIM // tile
            counts.add((room - slices) // 2 + 2)  # of the opening: slices + 2 (segments - 2)
            counts.add(room // slices + 1)
    most = max(3, min(SEGMENTS[-1], FILLED_WAVES[-1] * sm_count // call.states, call.chunks))
    lengths = {-(-call.chunks // count) for count in counts if 3 <= count <= most}
    return [SegmentPlan(call.chunks, n) for n in sorted(lengths, reverse=True) if n < call.chunks]


def check_split(split: str | bool | int) -> None:
    """Refuses what can be no choice of splitting, whatever the shape."""
    if isinstance(split, bool) or split == "auto":
        return
    if not isinstance(split, int):
        raise (ValueError if isinstance(split, str) else TypeError)(
            f"split is {split!r}; it must be 'auto', True, False or a number of segments"
        )
    if split < 2:
        raise ValueError(
            f"split is {split}; it must be at least 2 segments (False: no split), or 'auto'"
        )


def _check_cut(split: bool | int, call: CoreCall) -> None:
    """Refuses a split that is asked for and cannot be had."""
    least = 2 if split is True else split
    if least > call.chunks:
        raise ValueError(
            f"split is {split}, but tokens={call.tokens} is {call.chunks} chunk(s) of 64: a "
            "segment has at least one"
        )
    for name, number, most in (
        ("split", least, MAX_GRID // 2),  # the summary has two CTAs a segment
        ("sequences", call.sequences, MAX_GRID),
    ):
        if number > most:
            raise ValueError(f"{name}={number}: a split takes at most {most}")


def select_block_dv(heads_v: int, heads_q: int) -> int:
    """The lab's rule for the state columns of one CTA, that of its version v7: 64 or 128.

    With one q/k head per V head, 64 gives twice the CTAs. Where several V heads share a q/k head,
    128 makes Q K^T once per head instead of twice. It was found on a device of 14 SMs; core_plan
    decides for the SMs that are there.
    """
    if heads_q < 1 or heads_v < 1 or heads_v % heads_q:
        raise ValueError(f"heads_v={heads_v} must be a positive multiple of heads_q={heads_q}")
    return 64 if heads_v == heads_q else HEAD_DIM


def choose_backend(requested: str, device_type: str, capability: tuple[int, int] | None) -> str:
    """Which implementation runs: "cuda" (the Hopper kernels) or "torch" (the portable one).

    requested: "auto", "cuda" or "torch"; device_type: that of the tensors ("cuda", "cpu", ...);
    capability: compute capability of that CUDA device, None for others. "auto" takes the kernels
    exactly where they can run. Raises ValueError for an unknown name, or where "cuda" is asked for
    and cannot run.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend={requested!r} is not one of {', '.join(map(repr, BACKENDS))}")
    if device_type == "meta":
        raise ValueError("the tensors are on the meta device, which holds no data")
    hopper = device_type == "cuda" and capability == HOPPER
    if requested == "cuda" and not hopper:
        found = (
            f"compute capability {capability[0]}.{capability[1]}"
            if capability
            else f"device type {device_type!r}"
        )
        raise ValueError(
            f"backend='cuda' needs tensors on a GPU of compute capability 9.0 (Hopper), got {found}"
        )
    if requested == "auto":
        return "cuda" if hopper else "torch"
    return requested
