import pytest
import torch

from flt_mol.analysis.layer_cost import LayerSize
from flt_mol.analysis.speed.floors import (
    Fft,
    Other,
    Product,
    Rates,
    attention_products,
    block_products,
    byte_floor,
    floors_of,
    flop_floor,
    gemm_runner,
    linear_maps,
    rate_functions,
    roofline,
    with_backward,
)

# The layer of the issue: 7.08 million multiply-adds a token in its linear maps.
LAYER = LayerSize(tokens=1024)
SMALL = LayerSize(tokens=10, embed_dim=8, num_heads=2, num_features=3, num_frequencies=5, ffn_dim=6)


def flops(work):
    return sum(one.flops for one in work)


def test_a_product_by_hand():
    one = Product(2, 3, 5, times=7)
    assert one.flops == 7 * 2 * 2 * 3 * 5
    assert one.bytes == 7 * 4 * (6 + 15 + 10)
    assert one.backward() == (Product(2, 5, 3, 7), Product(3, 2, 5, 7))
    assert flops(with_backward([one])) == 3 * one.flops


def test_the_backward_products_have_the_shapes_of_the_gradients():
    x, w = torch.zeros(2, 3), torch.zeros(3, 5)
    slope = x @ w
    to_x, to_w = Product(2, 3, 5).backward()
    assert (slope @ w.T).shape == (to_x.rows, to_x.columns)
    assert w.T.shape == (to_x.inner, to_x.columns)
    assert (x.T @ slope).shape == (to_w.rows, to_w.columns)
    assert x.T.shape == (to_w.rows, to_w.inner)


def test_linear_maps_have_the_multiplications_of_the_issue():
    assert flops(linear_maps(LAYER)) / 1024 / 2 == pytest.approx(7.08e6, rel=1e-3)
    assert flops(linear_maps(LAYER, "attention")) == 2 * 1024 * 4 * 768**2


def test_linear_attention_by_hand():
    # Per head: features of q and k from D = 4, sums and read-out with D + 1 columns.
    assert flops(attention_products(SMALL, False)) == 2 * 2 * (2 * 10 * 4 * 3 + 2 * 10 * 3 * 5)
    # Position features add 2R = 10 columns to what features are made of.
    more = flops(attention_products(SMALL, True)) - flops(attention_products(SMALL, False))
    assert more == 2 * 2 * (2 * 10 * 10 * 3)


def test_softmax_and_fft_by_hand():
    maps = flops(linear_maps(SMALL))
    assert flops(block_products(SMALL, "softmax")) - maps == 2 * 2 * (2 * 10 * 10 * 4)
    transforms = 2 * 2 * 3 * 5 * round(2.5 * 20 * 4.321928)
    features, read_out = 2 * 2 * 2 * 10 * 4 * 3, 2 * 2 * 10 * 3 * 5
    assert flops(block_products(SMALL, "fft")) - maps == transforms + features + read_out
    assert Fft(8, 2).bytes == 2 * 4 * (8 + 10)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="expected one of linear, positions, softmax, fft"):
        block_products(SMALL, "lstm")


def test_floors_are_counts_over_rates():
    rates = Rates(flops=100.0, bytes=10.0)
    work = [Product(1, 1, 1), Other(flops=4000, bytes=10)]
    assert flop_floor(work, rates) == pytest.approx(40.02)
    assert byte_floor(work, rates) == pytest.approx(2.2)
    assert roofline(work, rates) == pytest.approx(1.2 + 40.0)
    assert floors_of(work, rates) == pytest.approx(
        {"flops": 4002, "gemm": 0.02, "bytes": 2.2, "roofline": 41.2}
    )
    assert flops(with_backward(work)) == 3 * 4002


def test_rates_of_a_machine():
    rates = Rates.of(sgemm_seconds=2.0, copy_seconds=4.0, size=10, numbers=5)
    assert rates == Rates(flops=1000.0, bytes=10.0)


def test_what_is_run_is_what_is_counted():
    with torch.profiler.profile(with_flops=True) as profile:
        gemm_runner(with_backward(linear_maps(SMALL)))()
        rate_functions(size=4, numbers=8)["sgemm"]()
    counted = sum(event.flops for event in profile.key_averages())
    assert counted == flops(with_backward(linear_maps(SMALL))) + 2 * 4**3
