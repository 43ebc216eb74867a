"""Every choice the package makes, as pure functions of shapes and of facts about the device. Importable without a GPU."""

from __future__ import annotations

HEAD_DIM = 128
CHUNK = 64
BACKENDS = ("auto", "cuda", "torch")
HOPPER = (9, 0)


def select_block_dv(heads_v: int, heads_q: int) -> int:
    """Columns of the state that one CTA of the four-group kernel owns: 64 or 128.

    With one q/k head per V head, 64 gives twice the CTAs. Where several V heads share a q/k head there are CTAs enough
    and 128 makes Q K^T once per head instead of twice (the lab's rule, seed of its version v7).
    """
    return 64 if heads_v == heads_q else HEAD_DIM


def choose_backend(requested: str, device_type: str, capability: tuple[int, int] | None) -> str:
    """Which implementation runs: "cuda" (the Hopper kernels) or "torch" (the portable one).

    requested: "auto", "cuda" or "torch"; device_type: that of the tensors ("cuda", "cpu", ...); capability: compute
    capability of that CUDA device, None for others. "auto" takes the kernels exactly where they can run. Raises
    ValueError for an unknown name, or where "cuda" is asked for and cannot run.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend={requested!r} is not one of {', '.join(map(repr, BACKENDS))}")
    hopper = device_type == "cuda" and capability == HOPPER
    if requested == "cuda" and not hopper:
        found = f"compute capability {capability[0]}.{capability[1]}" if capability else f"device type {device_type!r}"
        raise ValueError(f"backend='cuda' needs tensors on a GPU of compute capability 9.0 (Hopper), got {found}")
    if requested == "auto":
        return "cuda" if hopper else "torch"
    return requested
