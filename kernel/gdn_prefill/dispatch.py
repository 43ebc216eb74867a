"""Every choice the package makes, as pure functions of shapes and facts about the device."""

from __future__ import annotations

HEAD_DIM = 128
BACKENDS = ("auto", "cuda", "torch")
HOPPER = (9, 0)


# Microseconds per chunk of the four-group kernel by tile, one CTA per SM (H200;
# results/nvidia-h200/).
CHUNK_US = {32: 1.31, 64: 1.76, 128: 2.65}


def select_block_dv(heads_v: int, heads_q: int) -> int:
    """The lab's rule for the state columns of one CTA, that of its version v7: 64 or 128.

    With one q/k head per V head, 64 gives twice the CTAs. Where several V heads share a q/k head,
    128 makes Q K^T once per head instead of twice. It was found on a device of 14 SMs; block_dv_for
    decides for the SMs that are there.
    """
    if heads_q < 1 or heads_v < 1 or heads_v % heads_q:
        raise ValueError(f"heads_v={heads_v} must be a positive multiple of heads_q={heads_q}")
    return 64 if heads_v == heads_q else HEAD_DIM


def block_dv_for(states: int, sm_count: int) -> int:
    """The state columns of one CTA that finish soonest: 32, 64 or 128.

    states: B * Hv, the states of a call; sm_count: SMs of the device, each holding one CTA. All
    CTAs walk the same number of chunks, so the time is (waves of CTAs) * (time of a chunk at that
    tile); ties go to the wider tile.
    """
    if states < 1 or sm_count < 1:
        raise ValueError(f"states={states} and sm_count={sm_count} must be at least 1")

    def time(tile: int) -> float:
        ctas = states * (HEAD_DIM // tile)
        return -(-ctas // sm_count) * CHUNK_US[tile]

    return min(sorted(CHUNK_US, reverse=True), key=time)


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
