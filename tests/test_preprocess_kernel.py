"""The preprocessing kernels against the float64 reference: without a GPU and on a Hopper GPU.

A is compared with the float64 inverse of the same bf16 keys; what is allowed is bf16's own rounding
of A and little more. Without a GPU the kernels run in the tile emulator; the fused one, written
for single lanes and matrix registers, runs also as generated CUDA on the CPU (host_cuda).
"""

import functools
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("tilelang")

import host_cuda  # noqa: E402

from gdn_prefill.kernels import preprocess, preprocess_fused  # noqa: E402
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

# Largest error of A relative to its largest entry in a row: bf16 rounds by 2^-9, fp32 adds nothing
# and the fp16 operands of the fused kernel a fraction.
A_ERROR = 1.05 * 2**-9
FUSED_A_ERROR = 1.5 * 2**-9
G_ERROR = 64 * 2**-24


@dataclass(frozen=True)
class Inputs:
    k: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def to(self, device: str) -> "Inputs":
        return Inputs(self.k.to(device), self.g.to(device), self.beta.to(device))


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


def check(
    inputs: Inputs, g_cumsum: torch.Tensor, A: torch.Tensor, allowed: float = A_ERROR
) -> None:
    """Assert both results and the exact zeros and ones of A."""
    gate = finite_gate(inputs.g)
    expected_g = chunk_cumsum(gate)
    scale = expected_g.abs().amax().clamp_min(1.0)
    assert (g_cumsum - expected_g).abs().max() <= G_ERROR * scale

    assert not torch.isnan(A.float()).any()
    expected = solve_A(inputs.k, gate, inputs.beta)
    error = (A.double() - expected).abs()
    largest = expected.abs().amax(dim=-1, keepdim=True)
    assert (error <= allowed * largest).all(), f"worst {(error / largest).max():.2e}"

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


@pytest.fixture(scope="module")
def run_on_host(tmp_path_factory):
    """Runs the fused kernel's CUDA on the CPU: (inputs, blocks, seed) -> (g_cumsum, A)."""
    reason = host_cuda.unavailable()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("host_cuda")

    @functools.cache
    def compiled(config: PreprocessConfig) -> host_cuda.HostKernel:
        kernel = preprocess_fused.fused_preprocess_kernel(config)
        return host_cuda.HostKernel(kernel, preprocess_fused.PASS_CONFIGS, folder)

    def run(inputs: Inputs, blocks: int, seed: int = 0):
        B, T, Hq, _ = inputs.k.shape
        g_cumsum, A = poisoned(inputs)
        compiled(PreprocessConfig(Hq, inputs.g.shape[2])).launch(
            blocks,
            seed,
            k=inputs.k,
            g=inputs.g,
            beta=inputs.beta,
            g_cumsum=g_cumsum,
            A=A,
            batch=B,
            tokens=T,
            ctas=blocks,
        )
        return g_cumsum, A

    return run


@pytest.mark.parametrize(("heads_q", "heads_v"), [(1, 4), (2, 6)])
def test_fused_emulated(heads_q, heads_v):
    """Values, and every ordering that the detector knows: races, proxy fences, barriers."""
    inputs = make_inputs(1, 200, heads_q, heads_v, "decay")
    g_cumsum, A = poisoned(inputs)
    kernel = preprocess_fused.fused_preprocess_kernel(PreprocessConfig(heads_q, heads_v))
    tensors = inputs.k, inputs.g, inputs.beta, g_cumsum, A
    emulate(kernel, *tensors, 3, pass_configs=preprocess_fused.PASS_CONFIGS)
    check(inputs, g_cumsum, A, FUSED_A_ERROR)


@pytest.mark.parametrize("T", [1, 63, 64, 65, 127, 200])
def test_fused_lengths_on_host(run_on_host, T):
    inputs = make_inputs(2, T, 1, 4, "decay")
    check(inputs, *run_on_host(inputs, blocks=2), FUSED_A_ERROR)


@pytest.mark.parametrize("regime", REGIMES)
def test_fused_regimes_on_host(run_on_host, regime):
    inputs = make_inputs(1, 200, 1, 4, regime)
    check(inputs, *run_on_host(inputs, blocks=3), FUSED_A_ERROR)


@pytest.mark.parametrize(("heads_q", "heads_v"), [(2, 6), (5, 5)])
def test_fused_odd_heads_on_host(run_on_host, heads_q, heads_v):
    """Items whose V heads belong to several q/k heads, and one with fewer than four V heads."""
    inputs = make_inputs(2, 70, heads_q, heads_v, "decay")
    check(inputs, *run_on_host(inputs, blocks=3), FUSED_A_ERROR)


def test_fused_does_not_depend_on_the_order_of_threads(run_on_host):
    inputs = make_inputs(1, 330, 1, 4, "decay")
    expected = run_on_host(inputs, blocks=2)
    for seed in range(1, 7):
        found = run_on_host(inputs, 2, seed)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_fused_survives_keys_that_overflow_without_decay(run_on_host):
    """Keys of norm 40: sixteen undecayed rows would pass 1600^15, past the range of fp32."""
    inputs = make_inputs(1, 64, 1, 4, "large_keys")
    inputs = replace(inputs, k=(inputs.k.float() * 40 / HEAD_DIM**0.5).to(torch.bfloat16))
    check(inputs, *run_on_host(inputs, blocks=1), FUSED_A_ERROR)


@pytest.mark.parametrize(
    ("heads", "tiles", "stages"),
    [((16, 64), 1, 1), ((4, 4), 4, 2), ((2, 6), 2, 2), ((3, 3), 3, 1), ((1, 1), 1, 1)],
)
def test_fused_key_tiles(heads, tiles, stages):
    config = PreprocessConfig(*heads)
    assert preprocess_fused.key_tiles(config) == tiles
    assert preprocess_fused.key_stages(tiles) == stages


def test_fused_grid():
    config = PreprocessConfig(16, 64)
    assert preprocess_fused.grid(config, 1, 65, 132) == 2 * 16
    assert preprocess_fused.grid(config, 4, 8192, 132) == 132 * 3
    assert preprocess_fused.grid(PreprocessConfig(16, 16), 8, 8192, 132) == 132 * 2


@functools.cache
def launchers(config: PreprocessConfig):
    from gdn_prefill.runtime import compile_launcher

    kernels = cumsum_kernel(config), kkt_inverse_kernel(config)
    return tuple(compile_launcher(kernel, PASS_CONFIGS) for kernel in kernels)


@functools.cache
def fused_launcher(config: PreprocessConfig):
    from gdn_prefill.runtime import compile_launcher

    kernel = preprocess_fused.fused_preprocess_kernel(config)
    return compile_launcher(kernel, preprocess_fused.PASS_CONFIGS)


def launch_separate(inputs: Inputs, g_cumsum: torch.Tensor, A: torch.Tensor) -> None:
    sums, inverse = launchers(PreprocessConfig(inputs.k.shape[2], inputs.g.shape[2]))
    sums(inputs.g, g_cumsum)
    inverse(inputs.k, g_cumsum, inputs.beta, A)


def launch_fused(inputs: Inputs, g_cumsum: torch.Tensor, A: torch.Tensor) -> None:
    B, T, Hq, _ = inputs.k.shape
    config = PreprocessConfig(Hq, inputs.g.shape[2])
    sm_count = torch.cuda.get_device_properties(inputs.k.device).multi_processor_count
    ctas = preprocess_fused.grid(config, B, T, sm_count)
    fused_launcher(config)(inputs.k, inputs.g, inputs.beta, g_cumsum, A, ctas)


LAUNCHES = {"separate": (launch_separate, A_ERROR), "fused": (launch_fused, FUSED_A_ERROR)}


@pytest.mark.gpu
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kernels", LAUNCHES)
def test_kernels_on_gpu(kernels, group, regime):
    launch, allowed = LAUNCHES[kernels]
    for T in LENGTHS:
        inputs = make_inputs(3, T, 2, 2 * group, regime).to("cuda")
        g_cumsum, A = poisoned(inputs)
        launch(inputs, g_cumsum, A)
        check(inputs, g_cumsum, A, allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", LAUNCHES)
@pytest.mark.parametrize("heads", [(5, 5), (1, 1), (3, 3), (1, 7)])
def test_odd_head_counts_on_gpu(kernels, heads):
    launch, allowed = LAUNCHES[kernels]
    inputs = make_inputs(2, 200, *heads, "decay").to("cuda")
    g_cumsum, A = poisoned(inputs)
    launch(inputs, g_cumsum, A)
    check(inputs, g_cumsum, A, allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", LAUNCHES)
def test_gpu_is_bitwise_reproducible(kernels):
    launch, _ = LAUNCHES[kernels]
    inputs = make_inputs(3, 1025, 2, 8, "decay").to("cuda")
    first = poisoned(inputs)
    launch(inputs, *first)
    for _ in range(50):
        again = poisoned(inputs)
        launch(inputs, *again)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", LAUNCHES)
def test_gpu_leaves_neighbouring_memory_alone(kernels):
    """Rows past the end of the batch, inside the same allocation, keep their contents."""
    launch, allowed = LAUNCHES[kernels]
    inputs = make_inputs(1, 65, 1, 4, "decay").to("cuda")
    guard = 64
    g_all = torch.full((1, 65 + guard, 4), 7.0, device="cuda")
    A_all = torch.full((1, 65 + guard, 4, CHUNK), 7.0, dtype=torch.bfloat16, device="cuda")
    launch(inputs, g_all[:, :65], A_all[:, :65])
    check(inputs, g_all[:, :65], A_all[:, :65], allowed)
    assert (g_all[:, 65:] == 7.0).all() and (A_all[:, 65:] == 7.0).all()
