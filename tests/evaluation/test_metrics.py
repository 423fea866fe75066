import csv
import gzip
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flt_mol.evaluation.metrics import EnergyMetrics, energies, ewt, mae, metrics_of

REAL = os.environ.get("FLT_MOL_TEST_DATA")
FINITE = st.floats(-10, 10, allow_nan=False, width=32)


def computed(prediction, target):
    metrics = EnergyMetrics()
    metrics.update(prediction, target)
    return metrics.compute()


def test_closed_forms():
    errors = torch.tensor([0.01, -0.03, 0.0, 1.0], dtype=torch.float64)
    got = computed(errors, torch.zeros(4, dtype=torch.float64))
    assert got == {
        "count": 4,
        "mae": pytest.approx(1.04 / 4, abs=1e-15),
        "ewt": 0.5,
        "rmse": pytest.approx(math.sqrt((0.01**2 + 0.03**2 + 1) / 4), abs=1e-15),
        "me": pytest.approx(0.98 / 4, abs=1e-15),
    }
    assert type(got["count"]) is int
    assert all(type(got[name]) is float for name in ("mae", "ewt", "rmse", "me"))


def test_uniform_errors():
    """Errors at the midpoints of n cells of [-1, 1]: MAE 1/2, MSE (1 − 1/n²)/3, EwT = threshold."""
    n = 1000
    errors = (np.arange(n) + 0.5) * 2 / n - 1
    got = computed(errors, np.zeros(n))
    assert got["mae"] == pytest.approx(0.5, abs=1e-12)
    assert got["rmse"] == pytest.approx(math.sqrt((1 - 1 / n**2) / 3), abs=1e-12)
    assert got["me"] == pytest.approx(0, abs=1e-12)
    assert got["ewt"] == 0.02


def test_threshold_is_strict_and_compared_in_float64():
    assert ewt([0.02], [0.0]) == 0.0
    assert ewt([math.nextafter(0.02, 0)], [0.0]) == 1.0
    # The float32 nearest to 0.02 lies below 0.02, and within by itself; not after a float32 shift.
    assert ewt(torch.tensor([0.02], dtype=torch.float32), [0.0]) == 1.0
    assert ewt(torch.tensor([-5.0], dtype=torch.float32), [-5.02 + 1e-12]) == 1.0
    assert ewt(torch.tensor([-5.0], dtype=torch.float32), [-5.02 - 1e-12]) == 0.0


@settings(deadline=None)
@given(
    pairs=st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    seed=st.integers(0, 2**31),
)
def test_no_batching_and_no_order_changes_metrics(pairs, cuts, seed):
    pairs = np.array(pairs, dtype=np.float32)
    whole = computed(pairs[:, 0], pairs[:, 1])
    shuffled = pairs[np.random.default_rng(seed).permutation(len(pairs))]
    batched, other = EnergyMetrics(), EnergyMetrics()
    for number, part in enumerate(np.split(shuffled, sorted(c for c in cuts if c <= len(pairs)))):
        (batched if number % 2 else other).update(part[:, 0], part[:, 1])
    got = batched.merge(other).compute()
    assert got["count"] == whole["count"]
    assert got["ewt"] == whole["ewt"]
    for name in ("mae", "rmse", "me"):
        assert got[name] == pytest.approx(whole[name], rel=1e-12, abs=1e-12)


def test_not_a_mean_of_batch_means():
    metrics = EnergyMetrics()
    metrics.update([1.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    metrics.update([0.0], [0.0])
    assert metrics.compute()["mae"] == 0.75


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
@pytest.mark.parametrize("other", [(3,), (3, 1)])
def test_columns_are_squeezed(shape, other):
    prediction = torch.tensor([1.0, 2.0, 4.0]).reshape(shape)
    target = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64).reshape(other)
    assert mae(prediction, target) == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("shape", "other"),
    [
        ((3,), (1, 3)),
        ((1, 3), (3,)),
        ((3, 1), (1, 3)),
        ((3, 3), (3,)),
        ((3, 1, 1), (3,)),
        ((1,), (3,)),
        ((), (3,)),
        ((3,), (2,)),
        ((0,), (1,)),
    ],
)
def test_whatever_would_broadcast_is_refused(shape, other):
    metrics = EnergyMetrics()
    with pytest.raises(ValueError, match=r"shape|targets"):
        metrics.update(torch.zeros(shape), torch.zeros(other))
    assert metrics == EnergyMetrics()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["prediction", "target"])
def test_not_finite_is_refused_with_its_sid(bad, place):
    values = {"prediction": [0.0, 0.0, 0.0], "target": [0.0, 0.0, 0.0]}
    values[place] = [0.0, bad, 0.0]
    metrics = EnergyMetrics()
    with pytest.raises(ValueError, match=rf"{place} .*not a finite energy: sid 1700380$"):
        metrics.update(**values, sid=[7, 1700380, 9])
    with pytest.raises(ValueError, match="row 1"):
        metrics.update(**values)
    assert metrics == EnergyMetrics()


def test_many_bad_values_are_named_briefly():
    with pytest.raises(ValueError, match=r"sid 4 and 15 more$"):
        EnergyMetrics().update([math.nan] * 20, [0.0] * 20, sid=range(20))


def test_wrong_number_of_sids():
    with pytest.raises(ValueError, match="2 sids for 1"):
        EnergyMetrics().update([0.0], [0.0], sid=[1, 2])


def test_no_systems():
    with pytest.raises(ValueError, match="no systems"):
        EnergyMetrics().compute()
    with pytest.raises(ValueError, match="no systems"):
        mae([], [])


@pytest.mark.parametrize("values", [None, ["a"], [None, 1.0], [True], [1j]])
def test_not_numbers(values):
    with pytest.raises(ValueError, match="targets must be real numbers"):
        energies(values, "targets")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_dtypes_become_float64(dtype):
    values = torch.tensor([1.0, -2.0], dtype=torch.float32, requires_grad=True).to(dtype)
    assert energies(values).dtype == np.float64
    assert energies(values).tolist() == [1.0, -2.0]


@pytest.mark.skipif(not REAL, reason="FLT_MOL_TEST_DATA is not set")
def test_medians_of_the_oc20_validation_splits():
    targets: dict[str, list[float]] = {}
    file = Path(REAL or "") / "oc20" / "val_targets.csv.gz"
    with gzip.open(file, "rt", encoding="utf-8") as f:
        for row in csv.DictReader(f):
            targets.setdefault(row["split"], []).append(float(row["y_relaxed"]))
    got = {}
    for split, values in targets.items():
        metrics = EnergyMetrics()
        for start in range(0, len(values), 999):
            part = values[start : start + 999]
            metrics.update([float(np.median(values))] * len(part), part)
        got[split] = metrics.compute()
    assert {split: round(values["mae"], 3) for split, values in got.items()} == {
        "val_id": 1.744,
        "val_ood_ads": 1.714,
        "val_ood_cat": 1.733,
        "val_ood_both": 1.474,
    }
    assert sum(values["count"] for values in got.values()) == 99_854
    assert round(100 * got["val_id"]["ewt"], 2) == 0.71


SHAPES = st.sampled_from([(-1,), (-1, 1)])


@given(st.lists(st.tuples(FINITE, FINITE), min_size=2, max_size=30), SHAPES, SHAPES, st.data())
def test_columns_never_broadcast_and_batches_change_nothing(pairs, first, second, data):
    prediction, target = (np.array(v) for v in zip(*pairs, strict=True))
    want = metrics_of(prediction, target)
    error = prediction - target
    assert want["mae"] == pytest.approx(math.fsum(abs(error)) / len(error), rel=1e-12)
    assert want["ewt"] == sum(abs(e) < 0.02 for e in error) / len(error)
    assert want["median_ae"] == pytest.approx(np.percentile(abs(error), 50), rel=1e-12)
    got = metrics_of(torch.tensor(prediction).reshape(first), target.reshape(second))
    assert got == want
    with pytest.raises(ValueError, match="expected"):
        metrics_of(prediction[None], target.reshape(second))
    order = data.draw(st.permutations(range(len(pairs))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pairs)), max_size=4)))
    parts = EnergyMetrics()
    for rows in np.split(np.array(order), cuts):
        parts.update(prediction[rows].reshape(first), target[rows].reshape(second))
    assert parts.compute() == pytest.approx(
        {name: value for name, value in want.items() if name != "median_ae"}, rel=1e-9, abs=1e-12
    )
    shuffled = metrics_of(prediction[order], target[order])
    assert shuffled["median_ae"] == want["median_ae"]


def test_numbers_are_those_of_fairchem_core():
    """Written for `fairchem-core` 1.10 and 2.x, whose Evaluator has the task "is2re"."""
    module = pytest.importorskip("fairchem.core.modules.evaluator")
    rng = np.random.default_rng(0)
    target = torch.tensor(rng.normal(size=500))
    prediction = target + torch.tensor(rng.normal(0, 0.05, 500))
    theirs = module.Evaluator(task="is2re").eval({"energy": prediction}, {"energy": target})
    ours = metrics_of(prediction, target)
    assert ours["mae"] == pytest.approx(theirs["energy_mae"]["metric"], rel=1e-6)
    assert ours["rmse"] ** 2 == pytest.approx(theirs["energy_mse"]["metric"], rel=1e-6)
    assert ours["ewt"] == pytest.approx(theirs["energy_within_threshold"]["metric"], rel=1e-6)
