"""w8a8: the six GEMMs of a chunk with int8 operands, to see what eight bits leave of the answer.

Each operand is scaled to -127..127 by the largest magnitude along its contracted dimension: rows of
the left operands K, A, Q, scores and K^T, columns of the right ones S, W' and V_new. Products are
summed exactly in int32 and scaled back, the state stays FP32:

    U'    = K S                W' = beta (V - gamma U')         V_new = A W'
    O     = scale gamma (Q S) + scale tril(exp(g_i - g_j) Q K^T) V_new
    S     = gamma_last S + K^T (exp(g_last - g) V_new)

The tensor cores take 8-bit operands only with the contracted dimension contiguous, so right
operands are transposed on the way through shared memory and K is kept both ways round. One warp
group, element-wise loads, nothing overlapped: this version is about the error.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import tilelang
import tilelang.language as T
from tvm import tirx

from gdn_prefill.kernels.naming import named

from .early import CHUNK, FP32, HEAD_DIM, LOG2_E, SCALE, WARP_GROUP, load_gates, load_tile

BF16 = "bfloat16"
INT8 = "int8"
INT32 = "int32"
LARGEST_INT8 = 127.0
SMALLEST_MAGNITUDE = 1e-30  # keeps the scale of an all-zero row from dividing by zero

PASS_CONFIGS = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}


@dataclass(frozen=True)
class Int8Config:
    """What the int8 kernel is compiled for; fields as in EarlyConfig."""

    heads_q: int
    heads_v: int
    block_dv: int = 64
    use_initial_state: bool = False

    def __post_init__(self) -> None:
        if self.heads_q < 1 or self.heads_v < 1 or self.heads_v % self.heads_q:
            raise ValueError(
                f"heads_v = {self.heads_v} must be a positive multiple of heads_q = {self.heads_q}"
            )
        if self.block_dv not in (32, 64):
            raise ValueError(f"block_dv = {self.block_dv}, allowed are 32 and 64")


@T.macro
def quantise_rows(values, scales, quantised):
    """quantised [i, j] = values [i, j] / scales [i], rounded; scales [i] = max_j |values| / 127."""
    rows, columns = values.shape
    largest = T.alloc_fragment((rows,), FP32)
    T.reduce_absmax(values, largest, dim=1)
    for i in T.Parallel(rows):
        scales[i] = T.max(largest[i], SMALLEST_MAGNITUDE) / LARGEST_INT8
    for i, j in T.Parallel(rows, columns):
        quantised[i, j] = T.cast(T.round(values[i, j] / scales[i]), INT8)


@T.macro
def quantise_columns(values, staging, scales, quantised):
    """The same for columns, transposed: quantised [j, i] = values [i, j] / scales [j]."""
    rows, columns = values.shape
    for i, j in T.Parallel(rows, columns):
        staging[i, j] = values[i, j]
    transposed = T.alloc_fragment((columns, rows), FP32)
    for j, i in T.Parallel(columns, rows):
        transposed[j, i] = staging[i, j]
    quantise_rows(transposed, scales, quantised)


@T.macro
def quantise_tile(tile, scales, quantised):
    """A loaded bf16 tile [1, rows, columns] by rows."""
    rows, columns = quantised.shape
    values = T.alloc_fragment((rows, columns), FP32)
    for i, j in T.Parallel(rows, columns):
        values[i, j] = tile[0, i, j]
    quantise_rows(values, scales, quantised)


@T.macro
def quantise_tile_columns(tile, scales, quantised):
    """A loaded bf16 tile [1, rows, columns] by columns, transposed."""
    columns, rows = quantised.shape
    values = T.alloc_fragment((columns, rows), FP32)
    for j, i in T.Parallel(columns, rows):
        values[j, i] = tile[0, i, j]
    quantise_rows(values, scales, quantised)


@T.macro
def multiply(left, left_scales, right, right_scales, sums, product):
    """product [i, j] = sum_k left [i, k] right [j, k], both int8, scaled back."""
    T.fence_proxy_async()
    T.gemm(left, right, sums, transpose_B=True, clear_accum=True)
    for i, j in T.Parallel(product.shape[0], product.shape[1]):
        product[i, j] = T.cast(sums[i, j], FP32) * (left_scales[i] * right_scales[j])


@T.macro
def walk(config, place, inputs, loaded, eight, scales):
    dv = config.block_dv
    columns = slice(place.dv, place.dv + dv)
    state_fragment = T.alloc_fragment((HEAD_DIM, dv), FP32)
    update_fragment = T.alloc_fragment((HEAD_DIM, dv), FP32)
    update_sums = T.alloc_fragment((HEAD_DIM, dv), INT32)
    scores_fragment = T.alloc_fragment((CHUNK, CHUNK), FP32)
    scores_sums = T.alloc_fragment((CHUNK, CHUNK), INT32)
    value_fragment = T.alloc_fragment((CHUNK, dv), FP32)
    product_fragment = T.alloc_fragment((CHUNK, dv), FP32)
    output_fragment = T.alloc_fragment((CHUNK, dv), FP32)
    value_sums = T.alloc_fragment((CHUNK, dv), INT32)

    if config.use_initial_state:
        T.copy(inputs.initial_state[place.batch, place.head, 0:HEAD_DIM, columns], state_fragment)
    else:
        T.clear(state_fragment)
    for chunk in T.serial(place.chunks):
        first = chunk * CHUNK
        load_tile(place, inputs.q, first, place.head_q, 0, loaded.q, 0)
        load_tile(place, inputs.k, first, place.head_q, 0, loaded.k, 0)
        load_tile(place, inputs.v, first, place.head, place.dv, loaded.v, 0)
        load_tile(place, inputs.a, first, place.head, 0, loaded.a, 0)
        load_gates(place, inputs, first, loaded, 0)
        for i in T.Parallel(CHUNK):
            loaded.gamma[i] = T.exp2(loaded.g[0, i] * LOG2_E)
            loaded.decay[i] = T.exp2((loaded.g[0, CHUNK - 1] - loaded.g[0, i]) * LOG2_E)
        quantise_tile(loaded.q, scales.q, eight.q)
        quantise_tile(loaded.k, scales.k, eight.k)
        quantise_tile_columns(loaded.k, scales.k_transposed, eight.k_transposed)
        quantise_tile(loaded.a, scales.a, eight.a)
        quantise_columns(state_fragment, loaded.staging, scales.state, eight.state)

        # U' = K S
        multiply(eight.k, scales.k, eight.state, scales.state, value_sums, product_fragment)
        # W' = beta (V - gamma U')
        for i, j in T.Parallel(CHUNK, dv):
            value_fragment[i, j] = loaded.beta[0, i] * (
                loaded.v[0, i, j] - loaded.gamma[i] * product_fragment[i, j]
            )
        quantise_columns(value_fragment, loaded.staging, scales.value, eight.value)
        # V_new = A W'
        multiply(eight.a, scales.a, eight.value, scales.value, value_sums, value_fragment)

        # scores = scale tril(exp(g_i - g_j)) Q K^T
        multiply(eight.q, scales.q, eight.k, scales.k, scores_sums, scores_fragment)
        for i, j in T.Parallel(CHUNK, CHUNK):
            scores_fragment[i, j] *= T.if_then_else(
                i >= j, SCALE * T.exp2((loaded.g[0, i] - loaded.g[0, j]) * LOG2_E), 0
            )
        quantise_rows(scores_fragment, scales.scores, eight.scores)

        # O = scale gamma (Q S) + scores V_new
        multiply(eight.q, scales.q, eight.state, scales.state, value_sums, output_fragment)
        quantise_columns(value_fragment, loaded.staging, scales.value, eight.value)
        multiply(
            eight.scores, scales.scores, eight.value, scales.value, value_sums, product_fragment
        )
        for i, j in T.Parallel(CHUNK, dv):
            if first + i < place.tokens:
                inputs.output[place.batch, first + i, place.head, place.dv + j] = (
                    SCALE * loaded.gamma[i] * output_fragment[i, j] + product_fragment[i, j]
                )

        # S = gamma_last S + K^T (exp(g_last - g) V_new)
        for i, j in T.Parallel(CHUNK, dv):
            value_fragment[i, j] *= loaded.decay[i]
        quantise_columns(value_fragment, loaded.staging, scales.value, eight.value)
        multiply(
            eight.k_transposed,
            scales.k_transposed,
            eight.value,
            scales.value,
            update_sums,
            update_fragment,
        )
        for i, j in T.Parallel(HEAD_DIM, dv):
            state_fragment[i, j] = (
                loaded.gamma[CHUNK - 1] * state_fragment[i, j] + update_fragment[i, j]
            )
    T.copy(state_fragment, inputs.final_state[place.batch, place.head, 0:HEAD_DIM, columns])


def int8_kernel(config: Int8Config) -> tirx.PrimFunc:
    """Build the kernel for `config` as a TileLang PrimFunc; arguments as early.early_kernel's."""
    batch, tokens = T.dynamic("batch"), T.dynamic("tokens")
    heads_q, heads_v, dv = config.heads_q, config.heads_v, config.block_dv
    slices = HEAD_DIM // dv

    @T.prim_func
    def gdn_int8(
        q: T.Tensor((batch, tokens, heads_q, HEAD_DIM), BF16),
        k: T.Tensor((batch, tokens, heads_q, HEAD_DIM), BF16),
        v: T.Tensor((batch, tokens, heads_v, HEAD_DIM), BF16),
        g_cumsum: T.Tensor((batch, tokens, heads_v), FP32),
        beta: T.Tensor((batch, tokens, heads_v), FP32),
        a: T.Tensor((batch, tokens, heads_v, CHUNK), BF16),
        initial_state: T.Tensor((batch, heads_v, HEAD_DIM, HEAD_DIM), FP32),
        output: T.Tensor((batch, tokens, heads_v, HEAD_DIM), BF16),
        final_state: T.Tensor((batch, heads_v, HEAD_DIM, HEAD_DIM), FP32),
    ):
        with T.Kernel(slices * heads_v * batch, threads=WARP_GROUP) as block:
            inputs = SimpleNamespace(
                q=q,
                k=k,
                v=v,
                g=g_cumsum,
                beta=beta,
                a=a,
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
            )
            loaded = named(
                "_shared",
                q=T.alloc_shared((1, CHUNK, HEAD_DIM), BF16),
                k=T.alloc_shared((1, CHUNK, HEAD_DIM), BF16),
                v=T.alloc_shared((1, CHUNK, dv), BF16),
                a=T.alloc_shared((1, CHUNK, CHUNK), BF16),
                g=T.alloc_shared((1, CHUNK), FP32, scope="shared"),
                beta=T.alloc_shared((1, CHUNK), FP32, scope="shared"),
                gamma=T.alloc_shared((CHUNK,), FP32, scope="shared"),
                decay=T.alloc_shared((CHUNK,), FP32, scope="shared"),  # exp(g_last - g)
                staging=T.alloc_shared((HEAD_DIM, dv), FP32),
            )
            eight = named(
                "_int8_shared",
                q=T.alloc_shared((CHUNK, HEAD_DIM), INT8),
                k=T.alloc_shared((CHUNK, HEAD_DIM), INT8),
                k_transposed=T.alloc_shared((HEAD_DIM, CHUNK), INT8),
                a=T.alloc_shared((CHUNK, CHUNK), INT8),
                scores=T.alloc_shared((CHUNK, CHUNK), INT8),
                state=T.alloc_shared((dv, HEAD_DIM), INT8),
                value=T.alloc_shared((dv, CHUNK), INT8),
            )
            scales = named(
                "_scale_shared",
                q=T.alloc_shared((CHUNK,), FP32, scope="shared"),
                k=T.alloc_shared((CHUNK,), FP32, scope="shared"),
                k_transposed=T.alloc_shared((HEAD_DIM,), FP32, scope="shared"),
                a=T.alloc_shared((CHUNK,), FP32, scope="shared"),
                scores=T.alloc_shared((CHUNK,), FP32, scope="shared"),
                state=T.alloc_shared((dv,), FP32, scope="shared"),
                value=T.alloc_shared((dv,), FP32, scope="shared"),
            )
            walk(config, place, inputs, loaded, eight, scales)

    return gdn_int8
