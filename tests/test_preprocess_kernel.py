"""The preprocessing kernels against the float64 reference: emulated anywhere, run on a Hopper GPU.

A is compared with the float64 inverse of the same bf16 keys; what is allowed is bf16's own rounding
of A and a few of its units.
"""

import functools
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("tilelang")

from gdn_prefill.kernels import preprocess  # noqa: E402
from gdn_prefill.kernels.preprocess import (  # noqa: E402
    CHUNK,
    PASS_CONFIGS,
    PreprocessConfig,
    cumsum_kernel,
    kkt_inverse_kernel,
)
from reference.chunked import chunk_cumsum, solve_A  # noqa: E402
from tile_emulator import emulate  # noqa: E402

HEAD_DIM = 128
LENGTHS = (1, 63, 64, 65, 127, 1025)
GROUPS = (1, 2, 3, 4, 8)
REGIMES = ("decay", "strong", "none", "collinear", "large_keys", "forgets")

# Largest error of A relative to its largest entry in a row: bf16 rounds by 2^-9, fp32 adds nothing.
A_ERROR = 1.05 * 2**-9
G_ERROR = 64 * 2**-24


@dataclass(frozen=True)
class Inputs:
    k: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


def make_inputs(B: int, T: int, Hq: int, Hv: int, regime: str, seed: int = 0) -> Inputs:
    """Keys [B, T, Hq, 128] bf16, raw gate and beta [B, T, Hv] fp32 of one regime."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(B, T, Hq, HEAD_DIM, generator=generator)
    if regime == "collinear":
        direction = torch.randn(B, 1, Hq, HEAD_DIM, generator=generator)
        k = direction + 0.05 * k
    if regime != "large_keys":
        k = torch.nn.functional.normalize(k, dim=-1)
    g = torch.nn.functional.logsigmoid(torch.randn(B, T, Hv, generator=generator)) / 16
    if regime in ("strong", "large_keys"):
        g = g - 20.0
    elif regime == "none":
        g = torch.zeros_like(g)
    elif regime == "forgets":
        g[:, ::7] = -torch.inf
    beta = torch.sigmoid(torch.randn(B, T, Hv, generator=generator))
    return Inputs(k.to(torch.bfloat16), g, beta)


def finite_gate(g: torch.Tensor) -> torch.Tensor:
    """The gate as the cumsum kernel sums it: -inf stands for a decay to 0 in fp32."""
    return torch.where(g < preprocess.FORGETS, preprocess.FORGOTTEN, g)


def check(inputs: Inputs, g_cumsum: torch.Tensor, A: torch.Tensor) -> None:
    """Assert both results and the exact zeros and ones of A."""
    gate = finite_gate(inputs.g)
    expected_g = chunk_cumsum(gate)
    scale = expected_g.abs().amax().clamp_min(1.0)
    assert (g_cumsum - expected_g).abs().max() <= G_ERROR * scale

    assert not torch.isnan(A.float()).any()
    expected = solve_A(inputs.k, gate, inputs.beta)
    error = (A.double() - expected).abs()
    largest = expected.abs().amax(dim=-1, keepdim=True)
    assert (error <= A_ERROR * largest).all(), f"worst {(error / largest).max():.2e}"

    T = A.shape[1]
    row = torch.arange(T, device=A.device) % CHUNK
    column = torch.arange(CHUNK, device=A.device)
    upper = (column > row[:, None])[None, :, None, :].expand_as(A)
    assert (A[upper] == 0).all()
    on_diagonal = (column == row[:, None])[None, :, None, :].expand_as(A)
    assert (A[on_diagonal] == 1).all()


def poisoned(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output buffers that hold NaN."""
    A = torch.full(
        (*inputs.g.shape, CHUNK), torch.nan, dtype=torch.bfloat16, device=inputs.g.device
    )
    return torch.full_like(inputs.g, torch.nan), A


def run_emulated(inputs: Inputs, schedule: str = "roundrobin") -> tuple[torch.Tensor, torch.Tensor]:
    config = PreprocessConfig(inputs.k.shape[2], inputs.g.shape[2])
    g_cumsum, A = poisoned(inputs)
    options = {"schedule": schedule, "pass_configs": PASS_CONFIGS}
    emulate(cumsum_kernel(config), inputs.g, g_cumsum, **options)
    emulate(kkt_inverse_kernel(config), inputs.k, g_cumsum, inputs.beta, A, **options)
    return g_cumsum, A


@pytest.mark.parametrize("T", [1, 63, 64, 65, 130])
def test_lengths_emulated(T):
    inputs = make_inputs(2, T, 1, 2, "decay")
    check(inputs, *run_emulated(inputs))


@pytest.mark.parametrize("group", GROUPS)
def test_ratios_emulated(group):
    inputs = make_inputs(1, 70, 2, 2 * group, "decay")
    check(inputs, *run_emulated(inputs))


@pytest.mark.parametrize("regime", REGIMES)
def test_regimes_emulated(regime):
    inputs = make_inputs(1, 100, 1, 2, regime)
    check(inputs, *run_emulated(inputs))


def test_more_heads_than_one_cumsum_tile_emulated():
    """70 heads: one full tile of 64 and a second one with 58 heads masked."""
    inputs = make_inputs(1, 65, 1, 70, "decay")
    g_cumsum, _ = poisoned(inputs)
    emulate(cumsum_kernel(PreprocessConfig(1, 70)), inputs.g, g_cumsum, pass_configs=PASS_CONFIGS)
    expected = chunk_cumsum(inputs.g)
    assert (g_cumsum - expected).abs().max() <= G_ERROR * expected.abs().max().clamp_min(1.0)


def test_check_can_fail():
    inputs = make_inputs(1, 65, 1, 1, "decay")
    g_cumsum, A = run_emulated(inputs)
    wrong = A.clone()
    wrong[0, 40, 0, 3] += 0.02
    with pytest.raises(AssertionError):
        check(inputs, g_cumsum, wrong)
    with pytest.raises(AssertionError):
        check(inputs, g_cumsum + 1e-4, A)


def test_gate_below_the_floor_is_only_replaced_where_it_forgets():
    """A finite gate down to -1e4 is summed as it is; the reference's plain sum agrees."""
    inputs = make_inputs(1, 64, 1, 1, "decay")
    g = inputs.g.clone()
    g[0, 10] = -9000.0
    g_cumsum = torch.full_like(g, torch.nan)
    emulate(cumsum_kernel(PreprocessConfig(1, 1)), g, g_cumsum, pass_configs=PASS_CONFIGS)
    assert (g_cumsum - chunk_cumsum(g)).abs().max() <= G_ERROR * 9000


@pytest.mark.parametrize(("heads_q", "heads_v"), [(0, 4), (4, 6), (4, 2), (4, 0)])
def test_config_refuses_head_counts(heads_q, heads_v):
    with pytest.raises(ValueError, match=f"heads_v={heads_v}.*heads_q={heads_q}"):
        PreprocessConfig(heads_q, heads_v)


@pytest.mark.parametrize("heads", [1, 16, 17, 64, 65])
def test_head_tile_covers_the_block(heads):
    tile = PreprocessConfig(1, heads).head_tile
    assert tile * preprocess.SEGMENTS % preprocess.THREADS == 0
    assert tile >= min(heads, preprocess.MAX_HEAD_TILE)


@functools.cache
def launchers(config: PreprocessConfig):
    from gdn_prefill.runtime import compile_launcher

    kernels = cumsum_kernel(config), kkt_inverse_kernel(config)
    return tuple(compile_launcher(kernel, PASS_CONFIGS) for kernel in kernels)


def launch(inputs: Inputs, g_cumsum: torch.Tensor, A: torch.Tensor) -> None:
    sums, inverse = launchers(PreprocessConfig(inputs.k.shape[2], inputs.g.shape[2]))
    sums(inputs.g, g_cumsum)
    inverse(inputs.k, g_cumsum, inputs.beta, A)
    torch.cuda.synchronize()


def run_on_gpu(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = poisoned(inputs)
    launch(inputs, *outputs)
    return outputs


@pytest.mark.gpu
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("group", GROUPS)
def test_kernels_on_gpu(group, regime):
    for T in LENGTHS:
        inputs = make_inputs(3, T, 2, 2 * group, regime)
        inputs = Inputs(inputs.k.cuda(), inputs.g.cuda(), inputs.beta.cuda())
        check(inputs, *run_on_gpu(inputs))


@pytest.mark.gpu
def test_gpu_is_bitwise_reproducible():
    inputs = make_inputs(3, 1025, 2, 8, "decay")
    inputs = Inputs(inputs.k.cuda(), inputs.g.cuda(), inputs.beta.cuda())
    first = run_on_gpu(inputs)
    for _ in range(5):
        again = run_on_gpu(inputs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
def test_gpu_leaves_neighbouring_memory_alone():
    """Rows past the end of the batch, inside the same allocation, keep their contents."""
    inputs = make_inputs(1, 65, 1, 4, "decay")
    inputs = Inputs(inputs.k.cuda(), inputs.g.cuda(), inputs.beta.cuda())
    guard = 64
    g_all = torch.full((1, 65 + guard, 4), 7.0, device="cuda")
    A_all = torch.full((1, 65 + guard, 4, CHUNK), 7.0, dtype=torch.bfloat16, device="cuda")
    launch(inputs, g_all[:, :65], A_all[:, :65])
    check(inputs, g_all[:, :65], A_all[:, :65])
    assert (g_all[:, 65:] == 7.0).all() and (A_all[:, 65:] == 7.0).all()
