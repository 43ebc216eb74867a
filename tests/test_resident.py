"""The register-resident kernel: its configuration, its register layouts, its cost, its results."""

import pytest
import torch

pytest.importorskip("tilelang")

from cases import CHUNK, HEAD_DIM
from gdn_prefill import toolchain
from gdn_prefill.kernels import resident_common
from gdn_prefill.kernels.resident import PASS_CONFIGS, ResidentConfig, resident_kernel
from reference.chunked import chunk_cumsum, gdn_chunked, solve_A

TILES = (64, 128)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads_q": 3, "heads_v": 8}, "heads_v=8"),
        ({"heads_q": 0, "heads_v": 8}, "heads_q=0"),
        ({"block_dv": 32}, "block_dv=32"),
        ({"stages": 1}, "stages=1"),
        ({"slots": 0}, "slots=0"),
        ({"slots": 2, "block_dv": 128}, "slots=2 is an option of block_dv=64"),
        ({"unrolled": True, "block_dv": 128}, "unrolled=True"),
        ({"slots": 1}, "slots=1"),
        ({"slots": 4}, "stages=3"),
        ({"registers": (240, 144, 88, 64)}, "of 512"),
        ({"registers": (212, 144, 88, 64)}, "multiple of 8"),
        ({"registers": (176, 128, 32)}, "state, output, scores, service"),
        ({"registers": (200, 88, 40), "block_dv": 128}, "of 512"),
        ({"registers": (192, 88, 40, 64), "block_dv": 128}, "state, prepare, service"),
    ],
)
def test_configuration_names_what_is_wrong(settings, message):
    with pytest.raises(ValueError, match=message):
        ResidentConfig(**{"heads_q": 2, "heads_v": 8, **settings})


def test_names_tell_specialisations_apart():
    names = {
        ResidentConfig(2, 8, tile, use_initial_state=start, store_final_state=end).name
        for tile in TILES
        for start in (False, True)
        for end in (False, True)
    }
    assert len(names) == 8


def test_accumulator_layout_is_a_bijection_and_that_of_wgmma():
    places = {
        (resident_common.accumulator_thread(i, j), resident_common.accumulator_register(i, j))
        for i in range(resident_common.TILE)
        for j in range(resident_common.TILE)
    }
    expected = {(t, r) for t in range(128) for r in range(resident_common.ACCUMULATOR_REGISTERS)}
    assert places == expected
    # PTX ISA, wgmma m64nNk16 accumulator: row 16 w + l / 4 (+ 8), columns 8 n + 2 (l % 4) (+ 1).
    for warp, lane, block in ((0, 0, 0), (1, 5, 3), (3, 31, 7)):
        row, column = 16 * warp + lane // 4, 8 * block + 2 * (lane % 4)
        thread = 32 * warp + lane
        for offset, (i, j) in enumerate(
            ((row, column), (row, column + 1), (row + 8, column), (row + 8, column + 1))
        ):
            assert resident_common.accumulator_thread(i, j) == thread
            assert resident_common.accumulator_register(i, j) == 4 * block + offset


@pytest.mark.parametrize("tile", TILES)
def test_cost_fits_the_machine(tile):
    reason = toolchain.unavailable()
    if reason:
        pytest.skip(reason)
    config = ResidentConfig(2, 8, tile, use_initial_state=True)
    cost = toolchain.resources(resident_kernel(config), PASS_CONFIGS, sass=False)
    assert cost.problems() == ()
    assert cost.threads == config.threads


def draw(B, T, heads_q, heads_v, gate, device, seed=7):
    generator = torch.Generator(device).manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator, device=device)

    q, k = (
        torch.nn.functional.normalize(noise(B, T, heads_q, HEAD_DIM), dim=-1).bfloat16()
        for _ in range(2)
    )
    v = noise(B, T, heads_v, HEAD_DIM).bfloat16()
    g = torch.nn.functional.logsigmoid(noise(B, T, heads_v)) / 16
    if gate == "zero":
        g = torch.zeros_like(g)
    elif gate == "strong":
        g = -20 * torch.rand(g.shape, generator=generator, device=device)
    elif gate == "wild":
        pick = torch.rand(g.shape, generator=generator, device=device)
        g = torch.where(pick < 0.1, -50.0, torch.where(pick > 0.6, 0.0, g))
    beta = torch.sigmoid(noise(B, T, heads_v))
    return q, k, v, g, beta, noise(B, heads_v, HEAD_DIM, HEAD_DIM)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize(
    ("B", "T", "gate"),
    [
        (1, 1, "decay"),
        (1, CHUNK, "decay"),
        (2, 200, "wild"),
        (1, 129, "strong"),
        (1, 449, "zero"),
        (3, 1025, "decay"),
    ],
)
def test_agrees_with_float64(tile, start, B, T, gate):
    heads_q, heads_v = 2, 8
    q, k, v, g, beta, state = draw(B, T, heads_q, heads_v, gate, "cuda")
    config = ResidentConfig(heads_q, heads_v, tile, use_initial_state=start)
    kernel = toolchain.compile_for_hopper(resident_kernel(config), PASS_CONFIGS)
    expected = gdn_chunked(q, k, v, g, beta, state if start else None)
    output = torch.full_like(v, float("nan"))
    final = torch.full_like(state, float("nan"))
    dummy = torch.zeros(1, device="cuda")
    A = solve_A(k, g, beta).bfloat16()
    arguments = (q, k, v, chunk_cumsum(g).float(), beta, A, state if start else dummy)
    kernel(*arguments, output, final, HEAD_DIM**-0.5)
    for got, want in zip((output, final), expected, strict=True):
        error = (got.double() - want).norm() / want.norm()
        assert error < 5e-3
