import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flt_mol.evaluation import intervals
from flt_mol.evaluation.intervals import bootstrap_intervals
from flt_mol.evaluation.metrics import metrics_of


def naive(error, draws, seed, level=0.95):
    """The definition, one resample after the other."""
    error = np.array(sorted(error, key=lambda e: (abs(e), e)))
    rows = np.random.default_rng(seed).integers(0, len(error), (draws, len(error)))
    values = [metrics_of(error[row], np.zeros(len(row))) for row in rows]
    return {
        name: tuple(np.quantile([v[name] for v in values], [(1 - level) / 2, (1 + level) / 2]))
        for name in ("mae", "ewt", "rmse", "me", "median_ae")
    }


@pytest.mark.parametrize("size", [1, 2, 7, 10, 33])
def test_they_are_quantiles_over_resamples(size):
    error = np.random.default_rng(size).normal(0.1, 0.05, size)
    got = bootstrap_intervals(error, 0.9, 50, seed=3)
    wanted = naive(error, 50, 3, 0.9)
    assert set(got) == set(wanted)
    for name, ends in got.items():
        assert ends == pytest.approx(wanted[name], rel=1e-12), name


def test_width_is_that_of_theory():
    """Of S errors ±1 in turn: the mean has a standard error of 1/√S, the MAE none."""
    size = 4000
    found = bootstrap_intervals(np.resize([1.0, -1.0], size))
    assert found["mae"] == (1.0, 1.0)
    assert found["me"] == pytest.approx((-1.96 / size**0.5, 1.96 / size**0.5), rel=0.1)


def test_nineteen_of_twenty_hold_the_true_value():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        low, high = bootstrap_intervals(rng.uniform(-1, 1, 60), draws=200)["mae"]
        inside += low < 0.5 < high
    assert 0.90 < inside / 200 < 0.98


def test_memory_is_bounded_without_changing_a_number(monkeypatch):
    error = np.random.default_rng(1).normal(size=37)
    whole = bootstrap_intervals(error)
    monkeypatch.setattr(intervals, "_AT_ONCE", 100)
    sizes = [len(c) for c in intervals._resampled(np.random.default_rng(0), 37, 5)]
    assert sizes == [2, 2, 1]
    assert bootstrap_intervals(error) == whole


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_the_order_of_systems_changes_nothing(error, random):
    shuffled = random.sample(error, len(error))
    assert bootstrap_intervals(np.array(error), draws=20) == bootstrap_intervals(
        np.array(shuffled), draws=20
    )


def test_random_states_of_others_stay():
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    first = bootstrap_intervals(np.arange(5.0))
    assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002
    assert first == bootstrap_intervals(np.arange(5.0))
    assert first != bootstrap_intervals(np.arange(5.0), seed=1)


@pytest.mark.parametrize(
    ("error", "level", "match"),
    [
        ([], 0.95, "at least one system"),
        ([np.nan], 0.95, "finite"),
        ([1.0], 1.0, "level is 1"),
        ([[1.0, 2.0]], 0.95, "shape"),
        ([1.0], "0.95", "level is '0.95', expected a number between 0 and 1"),
        ([1.0], True, "level is True"),
    ],
)
def test_refusals(error, level, match):
    with pytest.raises(ValueError, match=match):
        bootstrap_intervals(np.array(error), level)


@pytest.mark.parametrize("draws", [0, 2.5, True, None])
def test_draws_that_are_none(draws):
    with pytest.raises(ValueError, match="draws must be"):
        bootstrap_intervals(np.array([1.0]), draws=draws)
