"""The pure choices: tile by waves of CTAs, backend by device."""

import pytest

from gdn_prefill.dispatch import block_dv_for, choose_backend, select_block_dv


@pytest.mark.parametrize(
    ("heads_v", "heads_q", "tile"), [(4, 4, 64), (16, 16, 64), (16, 4, 128), (8, 2, 128)]
)
def test_the_labs_rule_looks_at_the_heads_alone(heads_v, heads_q, tile):
    assert select_block_dv(heads_v, heads_q) == tile


@pytest.mark.parametrize(
    ("states", "sms", "tile"),
    [
        (8, 132, 32),  # few states: the narrowest tile, four CTAs each, all in one wave
        (33, 132, 32),  # 132 CTAs fill the device exactly
        (34, 132, 64),  # 136 CTAs of the narrow tile would need a second wave
        (64, 132, 64),
        (67, 132, 128),  # 67 wide CTAs in one wave, 134 of the middle tile in two
        (1, 1, 128),  # 2.65 us a chunk instead of two waves of 1.76 or four of 1.31
    ],
)
def test_the_tile_that_finishes_soonest(states, sms, tile):
    assert block_dv_for(states, sms) == tile


@pytest.mark.parametrize(("states", "sms"), [(0, 132), (8, 0)])
def test_sizes_below_one_are_refused(states, sms):
    with pytest.raises(ValueError, match="at least 1"):
        block_dv_for(states, sms)


@pytest.mark.parametrize(
    ("requested", "device", "capability", "chosen"),
    [
        ("auto", "cuda", (9, 0), "cuda"),
        ("auto", "cuda", (8, 0), "torch"),
        ("auto", "cuda", (10, 0), "torch"),
        ("auto", "cpu", None, "torch"),
        ("torch", "cuda", (9, 0), "torch"),
        ("cuda", "cuda", (9, 0), "cuda"),
    ],
)
def test_backend(requested, device, capability, chosen):
    assert choose_backend(requested, device, capability) == chosen


@pytest.mark.parametrize(("device", "capability"), [("cpu", None), ("cuda", (8, 0))])
def test_cuda_is_refused_where_the_kernels_cannot_run(device, capability):
    with pytest.raises(ValueError, match="backend='cuda' needs"):
        choose_backend("cuda", device, capability)


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="'hip'"):
        choose_backend("hip", "cuda", (9, 0))


@pytest.mark.parametrize(("heads_v", "heads_q"), [(0, 0), (7, 2), (4, 0)])
def test_the_labs_rule_refuses_heads_that_do_not_divide(heads_v, heads_q):
    with pytest.raises(ValueError, match="positive multiple"):
        select_block_dv(heads_v, heads_q)
