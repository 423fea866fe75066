import math

import pytest
import torch

from flt_mol.analysis import crossover as module
from flt_mol.analysis.crossover import AttentionShape, column, crossing, time_modes
from flt_mol.analysis.timing import Timings

SMALL = AttentionShape(head_dim=4, num_features=8, embed_dim=8, num_frequencies=2, rows=32)


def test_the_crossing_lies_where_a_power_law_meets_one():
    sizes = [2**n for n in range(4, 13)]
    ratios = [(size / 300) ** 1.3 for size in sizes]
    assert crossing(sizes, ratios) == pytest.approx(300, abs=0.1)


def test_crossings_beyond_the_sizes_measured():
    assert crossing([16, 32], [1.1, 2.0]) == 0
    assert crossing([16, 32], [0.4, 0.9]) == math.inf


def test_of_several_crossings_the_last_counts():
    assert 64 < crossing([16, 32, 64, 128], [0.5, 1.1, 0.9, 1.5]) < 128


@pytest.mark.parametrize("part", ["heads", "layer"])
@pytest.mark.parametrize("passes", ["forward", "training"])
@pytest.mark.parametrize("causal", [False, True])
def test_every_mode_is_timed(part, passes, causal):
    shape = SMALL._replace(causal=causal)
    state = torch.get_rng_state()
    timings = time_modes(
        shape, 8, part, passes, modes=("linear", "exact", "auto"), exact_below=4, rounds=2
    )
    assert set(timings.seconds) == {"linear", "exact", "auto"}
    assert all(t > 0 for times in timings.seconds.values() for t in times)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_positions():
    shape = SMALL._replace(num_frequencies=0)
    assert time_modes(shape, 4, rounds=1).ratio("exact", over="linear").median > 0


def test_a_column_has_a_ratio_for_each_size():
    ratios, summary = column(SMALL, [4, 8], "layer", "forward", rounds=1)
    assert len(ratios) == 2
    assert summary == crossing([4, 8], ratios)
    ratios, worst = column(SMALL, [4, 8], "heads", "forward", check=True, rounds=1)
    assert worst == max(ratios)


def test_a_check_is_against_the_better_mode(monkeypatch):
    seconds = {"linear": [2.0], "exact": [4.0], "auto": [3.0]}
    monkeypatch.setattr(module, "time_modes", lambda *_, **__: Timings(seconds))
    assert column(SMALL, [4], "heads", "forward", check=True) == ([1.5], 1.5)
    assert column(SMALL, [4], "heads", "forward") == ([2.0], 0)


@pytest.mark.parametrize("part", ["heads", "layer"])
def test_what_is_timed_is_the_mode_that_it_is_called_by(part):
    layer, batch = module._layer(SMALL), module._batch(SMALL, 8)
    runs = {mode: module._run(layer, mode, part, "forward", batch) for mode in ("linear", "exact")}
    outs = {}
    for mode, run in runs.items():
        outs[mode] = run()
        layer.mode = mode
        if part == "layer":
            torch.testing.assert_close(outs[mode], layer(*batch[:2], ptr=batch[2]))
    assert not torch.allclose(outs["linear"], outs["exact"], atol=1e-3)


def test_exact_attention_falls_behind_in_large_systems():
    shape = AttentionShape(head_dim=16, num_features=16, embed_dim=32, rows=2048)
    (small, large), _ = column(shape, [16, 2048], "heads", "forward", rounds=3)
    assert large > 3 * small


@pytest.mark.parametrize("given", [("head", "forward"), ("heads", "backward")])
def test_unknown_parts_and_passes_are_refused(given):
    with pytest.raises(ValueError, match="expected one of heads, layer and of forward, training"):
        time_modes(SMALL, 4, *given)
