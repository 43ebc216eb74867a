"""The register-resident forward kernel: the transposed state never leaves its groups' registers.

This is the lab's entry: the kernel whose gates and A are given. What a CTA does is in
resident_narrow.py where it owns 64 columns of a head's state, and in resident_wide.py where it owns
all 128; resident_operator.py gives both the operands of the full operator.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import tilelang.cuda.language as TC
import tilelang.language as T

from . import resident_narrow, resident_wide
from .resident_common import (
    CHUNK,
    FLUSH_LIMIT,
    HEAD_DIM,
    PASS_CONFIGS,
    SegmentTokens,
    TileConfig,
    clear_state,
    load_boundary,
    state_parts,
    store_first_boundary,
    store_tile,
)

__all__ = [
    "PASS_CONFIGS",
    "ResidentConfig",
    "resident_cta",
    "resident_kernel",
]

TILES = {64: resident_narrow, 128: resident_wide}


@dataclass(frozen=True)
class ResidentConfig(TileConfig):
    """What one compiled resident kernel is specialised on; batch, length and scale are arguments.

    segmented: run over the segments of a split over time, from the states that its scan leaves.
    """

    use_initial_state: bool = False
    store_final_state: bool = True
    segmented: bool = False

    dtype: ClassVar[str] = "bfloat16"
    l2norm: ClassVar[bool] = False
    packed: ClassVar[bool] = False
    inverse_blocks: ClassVar[bool] = False
    keeps_states: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.registers is None and self.block_dv == HEAD_DIM and not self.segmented:
            # The gate warps of the other kernels need 40; the prepare group is faster with 96.
            object.__setattr__(self, "registers", (192, 96, 32))
        super().__post_init__()

    @property
    def name(self) -> str:
        """A readable name of the specialisation, unique among the shipped ones."""
        start = "init" if self.use_initial_state else "zero"
        end = "final" if self.store_final_state else "drop"
        kind = "segment_" if self.segmented else ""
        return f"{kind}resident_hq{self.heads_q}_hv{self.heads_v}_dv{self.block_dv}_{start}_{end}"


@T.macro
def resident_cta(config, place, scale, inputs, hooks):
    """Everything one CTA does: its memory, its barriers, its roles."""
    if config.segmented:
        if place.beside == 0:
            TC.pdl_sync()
    else:
        TC.pdl_sync()  # launched before the launch that it reads from has ended
    tile = TILES[config.block_dv]
    memory = tile.cta_memory(config)
    if config.packed:
        if place.chunks > 0:
            tile.run_roles(config, place, scale, inputs, hooks, memory)
        else:
            hooks.copy_state(config, place, inputs)
    else:
        tile.run_roles(config, place, scale, inputs, hooks, memory)
    if config.segmented and place.beside != 0:
        # What comes after waits for this launch, and so for the one that this one ran beside.
        TC.pdl_sync()


# --- the lab's kernel
@T.macro
def load_initial_state(config, place, inputs, registers):
    if config.use_initial_state:
        for part, first in state_parts(registers):
            for i, j in T.Parallel(*part.shape):
                part[i, j] = inputs.initial_state[place.batch, place.head, first + j, place.dv + i]
    else:
        clear_state(registers)


@T.macro
def load_state(config, place, inputs, registers):
    """The state that the CTA's first chunk begins with."""
    if config.segmented:
        if place.segment > 0:
            load_boundary(place, inputs.states, registers)
        else:
            load_initial_state(config, place, inputs, registers)
    else:
        load_initial_state(config, place, inputs, registers)


@T.macro
def store_final_state(config, place, inputs, registers):
    for part, first in state_parts(registers):
        for i, j in T.Parallel(*part.shape):
            inputs.final_state[place.batch, place.head, first + j, place.dv + i] = (
                part[i, j] * registers.owed[0]
            )


@T.macro
def store_state(config, place, inputs, registers):
    """The state after a sequence's last chunk; of a split also that after its first segment."""
    if config.segmented:
        if place.segment == 0:
            store_first_boundary(place, inputs.states, registers)
        elif config.store_final_state and place.segment == place.segments - 1:
            store_final_state(config, place, inputs, registers)
    elif config.store_final_state:
        store_final_state(config, place, inputs, registers)


@T.macro
def fetch_gates(config, place, chunk, token, inputs, gates):
    """Log of gamma of the token, and beta; a tail repeats its last."""
    own = chunk * CHUNK + token
    here = T.min(own, place.tokens - 1)
    gates.gate[0] = inputs.g[place.batch, here, place.head]
    gates.beta[0] = T.if_then_else(
        own < place.tokens, inputs.beta[place.batch, here, place.head], 0.0
    )


@T.macro
def store_output(config, place, chunk, lane, inputs, tiles):
    store_tile(config, place, chunk, inputs, tiles)


LAB = SimpleNamespace(
    load_state=load_state,
    store_state=store_state,
    fetch_gates=fetch_gates,
    store_output=store_output,
)


def resident_kernel(config: ResidentConfig):
    """Build the register-resident forward kernel as a TileLang PrimFunc.

    Arguments of the PrimFunc: q, k [B, T, Hq, 128] bf16, v [B, T, Hv, 128] bf16, g_cumsum and
    beta [B, T, Hv] fp32, A [B, T, Hv, 64] bf16, initial_state [B, Hv, 128, 128] fp32 (a one-element
    dummy unless config.use_initial_state), output [B, T, Hv, 128] bf16, final_state
    [B, Hv, 128, 128] fp32 (a one-element dummy unless config.store_final_state), scale fp32.
    B and T are dynamic.

    With config.segmented there are more: after initial_state, states [segments - 1, B, Hv, 128
    (dv), 128 (dk)] fp32, the state at the end of every segment but the last as the scan of a split
    leaves it, and at the end chunks_per_segment int32, of which the last segment has what remains,
    at least one, and first_segment, launched and beside int32: run so many segments from the first
    on, and if beside is not 0, run beside the launch before, which has waited for all that is read
    here. The first segment writes states[0]. Segments >= 2 are dynamic.
    """
    return _segments(config) if config.segmented else _sequences(config)


def _sequences(config: ResidentConfig):
    """One CTA per tile of a sequence's state."""
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    heads_q, heads_v, dv = config.heads_q, config.heads_v, config.block_dv
    slices = HEAD_DIM // dv
    state_shape = (batch, heads_v, HEAD_DIM, HEAD_DIM)
    bf16, fp32 = "bfloat16", "float32"

    @T.prim_func
    def gdn_forward_resident(
        q: T.Tensor((batch, tokens, heads_q, HEAD_DIM), bf16),
        k: T.Tensor((batch, tokens, heads_q, HEAD_DIM), bf16),
        v: T.Tensor((batch, tokens, heads_v, HEAD_DIM), bf16),
        g_cumsum: T.Tensor((batch, tokens, heads_v), fp32),
        beta: T.Tensor((batch, tokens, heads_v), fp32),
        A: T.Tensor((batch, tokens, heads_v, CHUNK), bf16),
        initial_state: T.Tensor(state_shape if config.use_initial_state else (1,), fp32),
        output: T.Tensor((batch, tokens, heads_v, HEAD_DIM), bf16),
        final_state: T.Tensor(state_shape if config.store_final_state else (1,), fp32),
        scale: T.float32,
    ):
        with T.Kernel(
            slices * heads_v * batch, threads=config.threads, cluster_dims=config.cluster
        ) as (block,):
            inputs = SimpleNamespace(
                q=q,
                k=k,
                v=v,
                g=g_cumsum,
                beta=beta,
                a=A,
                initial_state=initial_state,
                output=output,
                final_state=final_state,
            )
            place = SimpleNamespace(
                batch=block // (slices * heads_v),
                head=block // slices % heads_v,
                head_q=block // slices % heads_v // (heads_v // heads_q),
                dv=block % slices * dv,
                tokens=tokens,
                chunks=T.ceildiv(tokens, CHUNK),
                flush_limit=FLUSH_LIMIT,
            )
            resident_cta(config, place, scale, inputs, LAB)

    return gdn_forward_resident


def _segments(config: ResidentConfig):
    """One CTA per tile of a sequence's state and segment of its tokens."""
    batch, tokens, boundaries = T.dynamic("batch"), T.dynamic("tokens"), T.dynamic("boundaries")
    heads_q, heads_v, dv = config.heads_q, config.heads_v, config.block_dv
    slices = HEAD_DIM // dv
    state_shape = (batch, heads_v, HEAD_DIM, HEAD_DIM)
    bf16, fp32 = "bfloat16", "float32"

    @T.prim_func
    def gdn_segment_forward(
        q: T.Tensor((batch, tokens, heads_q, HEAD_DIM), bf16),
        k: T.Tensor((batch, tokens, heads_q, HEAD_DIM), bf16),
        v: T.Tensor((batch, tokens, heads_v, HEAD_DIM), bf16),
        g_cumsum: T.Tensor((batch, tokens, heads_v), fp32),
        beta: T.Tensor((batch, tokens, heads_v), fp32),
        A: T.Tensor((batch, tokens, heads_v, CHUNK), bf16),
        initial_state: T.Tensor(state_shape if config.use_initial_state else (1,), fp32),
        states: T.Tensor((boundaries, *state_shape), fp32),
        output: T.Tensor((batch, tokens, heads_v, HEAD_DIM), bf16),
        final_state: T.Tensor(state_shape if config.store_final_state else (1,), fp32),
        scale: T.float32,
        chunks_per_segment: T.int32,
        first_segment: T.int32,
        launched: T.int32,
        beside: T.int32,
    ):
        # Three extents, as a division by a run-time number would land in every TMA coordinate.
        with T.Kernel(
            slices * heads_v, batch, launched, threads=config.threads, cluster_dims=config.cluster
        ) as (
            tile,
            sequence,
            number,
        ):
            segment = first_segment + number
            first = segment * chunks_per_segment * CHUNK
            inputs = SimpleNamespace(
                q=SegmentTokens(q, first),
                k=SegmentTokens(k, first),
                v=SegmentTokens(v, first),
                g=SegmentTokens(g_cumsum, first),
                beta=SegmentTokens(beta, first),
                a=SegmentTokens(A, first),
                initial_state=initial_state,
                states=states,
                output=SegmentTokens(output, first),
                final_state=final_state,
            )
            place = SimpleNamespace(
                batch=sequence,
                head=tile // slices,
                head_q=tile // slices // (heads_v // heads_q),
                dv=tile % slices * dv,
                segment=segment,
                segments=boundaries + 1,
                beside=beside,
                tokens=tokens - first,
                chunks=T.min(chunks_per_segment, T.ceildiv(tokens - first, CHUNK)),
                flush_limit=FLUSH_LIMIT,
            )
            resident_cta(config, place, scale, inputs, LAB)

    return gdn_segment_forward
