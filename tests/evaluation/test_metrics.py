from dataclasses import replace

import numpy as np
import pytest
import torch

from flt_mol import Structures
from flt_mol.evaluation import EnergyMetrics, bootstrap_intervals, metrics_of
from flt_mol.evaluation.metrics import force_sums

TARGET = np.array([0.0, 0.0, 2.0, 0.5, -3.0])
PREDICTION = np.array([0.01, 0.02, 2.03, 1.0, -4.0])  # errors 0.01, exactly 0.02, 0.03, 0.5, -1


@pytest.mark.parametrize("convert", [np.float32, lambda x: torch.tensor(x, dtype=torch.float32)])
@pytest.mark.parametrize("target", [0.0, 1.0, -3.0])
def test_the_threshold_is_that_of_float32_where_energies_are(convert, target):
    errors = np.array([0.02, -0.02, 0.0199, 0.0201, 0.5])
    wanted = np.float32(target) + np.zeros(5, np.float32)
    found = metrics_of(convert(wanted + errors.astype(np.float32)), convert(wanted))
    inside = np.abs((wanted + errors.astype(np.float32)) - wanted) < np.float32(0.02)
    assert found["ewt"] == inside.mean()
    assert target or found["ewt"] == 0.2


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("columns", [(False, False), (True, False), (False, True), (True, True)])
def test_sums_over_systems_whatever_the_batches_and_shapes(size, columns):
    """The mean of batch means would be 0.4267 eV for batches of two, EwT with <= would be 40 %."""
    metrics = EnergyMetrics()
    for start in range(0, 5, size):
        parts = [x[start : start + size] for x in (PREDICTION, TARGET)]
        pair = [x[:, None] if column else x for x, column in zip(parts, columns, strict=True)]
        metrics.update(*pair, sid=range(start, start + len(parts[0])))
    found = metrics.compute()
    assert found["count"] == 5
    assert found["mae"] == pytest.approx(0.312)
    assert found["ewt"] == 0.2
    assert found["me"] == pytest.approx(-0.088)
    assert found["median_ae"] == pytest.approx(0.03)
    assert found["rmse"] == pytest.approx(np.sqrt((0.01**2 + 0.02**2 + 0.03**2 + 0.25 + 1) / 5))


def test_ewt_is_strictly_below():
    assert metrics_of([0.02, np.nextafter(0.02, 0)], [0.0, 0.0])["ewt"] == 0.5
    float32 = torch.tensor([0.02])  # 0.0199999996 in float64, not below in training's float32
    assert metrics_of(float32, [0.0])["ewt"] == 0.0


@pytest.mark.parametrize(
    ("prediction", "target"),
    [
        (PREDICTION[None], TARGET),
        (PREDICTION, TARGET[None]),
        (PREDICTION[:4], TARGET),
        (PREDICTION[:1], TARGET),
        (np.ones((5, 2)), TARGET),
        (np.ones((5, 1, 1)), TARGET),
        (None, TARGET),
        (["a"] * 5, TARGET),
    ],
)
def test_shapes_that_would_broadcast_are_refused(prediction, target):
    metrics = EnergyMetrics()
    with pytest.raises(ValueError, match="shape|predictions"):
        metrics.update(prediction, target)
    with pytest.raises(ValueError, match="no systems"):
        metrics.compute()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["prediction", "target"])
def test_numbers_that_are_not_finite_are_named(bad, which):
    values = {"prediction": PREDICTION.copy(), "target": TARGET.copy()}
    values[which][[1, 3]] = bad
    with pytest.raises(ValueError, match=rf"{which} .*sid b"):
        metrics_of(**values, sid="abcde")
    with pytest.raises(ValueError, match="row 1"):
        metrics_of(**values)


def test_a_system_counts_once():
    metrics = EnergyMetrics()
    metrics.update([0.0, 1.0], [0.0, 1.0], sid=["a", "b"])
    for sids in (["b"], [7, "7"]):
        with pytest.raises(ValueError, match=f"sid {sids[0]} comes twice"):
            metrics.update([0.0] * len(sids), [0.0] * len(sids), sid=sids)
    assert metrics.compute()["count"] == 2


def test_no_systems_have_no_metrics():
    with pytest.raises(ValueError, match="no systems"):
        EnergyMetrics().compute()
    with pytest.raises(ValueError, match="3 sids"):
        metrics_of(PREDICTION, TARGET, sid="abc")


def test_intervals_are_those_of_theory():
    """Of a mean: ± 1.96 σ/√S; of a share p: σ² = p (1 − p)."""
    rng = np.random.default_rng(3)
    error = np.where(rng.random(2000) < 0.3, 0.01, 0.5)
    found = bootstrap_intervals(error)
    share = np.mean(error == 0.01)
    half = 1.96 * np.sqrt(share * (1 - share) / 2000)
    assert found["ewt"] == pytest.approx((share - half, share + half), abs=0.1 * half)
    half *= 0.49
    assert found["mae"] == pytest.approx((error.mean() - half, error.mean() + half), abs=0.1 * half)
    assert found["me"] == pytest.approx(found["mae"])
    assert found["median_ae"] == (0.5, 0.5)


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(100):
        low, high = bootstrap_intervals(rng.exponential(1.0, 60), ["mae"])["mae"]
        inside += low <= 1.0 <= high
    assert 85 <= inside <= 100


def test_intervals_do_not_depend_on_the_order_and_repeat():
    error = np.random.default_rng(1).normal(size=50)
    assert bootstrap_intervals(error) == bootstrap_intervals(error[::-1])
    assert bootstrap_intervals(error) != bootstrap_intervals(error, seed=1)


def test_one_system_has_intervals_without_width():
    found = bootstrap_intervals([-0.5])
    assert found["mae"] == (0.5, 0.5)
    assert found["me"] == (-0.5, -0.5)
    for wrong in ([], [np.nan]):
        with pytest.raises(ValueError, match="at least one system"):
            bootstrap_intervals(wrong)


def test_forces_by_hand():
    """Two systems of two atoms, of which the first atom is fixed; one with unknown forces."""
    one = Structures.single([1, 1], torch.zeros(2, 3), fixed=[1, 0], forces=torch.ones(2, 3))
    unknown = replace(one, forces=torch.full((2, 3), torch.nan))
    systems = Structures.cat([one, one, one, unknown])
    forces = torch.full((8, 3), 9.0)
    forces[1], forces[5] = 1.029, torch.tensor([1.0, 1, 1.031])
    forces[3] = torch.tensor([-1.0, -1, -1])
    found = force_sums(forces, torch.tensor([0.019, 0.0, -0.01, 0.0]), systems)
    assert found["forces_mae"] == (pytest.approx(3 * 0.029 + 6 + 0.031, abs=1e-5), 9)
    assert found["forces_cosine"] == (pytest.approx(1.0, abs=1e-3), 3)  # 1, -1, 1
    assert found["efwt"] == (1.0, 3)
    late = force_sums(forces, torch.tensor([-0.021, 0, 0, 0]), systems)
    assert late["efwt"] == (0.0, 3)
    assert force_sums(forces[6:], torch.zeros(1), unknown) == dict.fromkeys(found, (0.0, 0))
    with pytest.raises(ValueError, match="forces"):
        force_sums(forces, torch.zeros(4), replace(systems, forces=None))
