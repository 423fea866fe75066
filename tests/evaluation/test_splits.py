import csv
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flt_mol.evaluation.report import maes, write_csv
from flt_mol.evaluation.splits import (
    SplitResult,
    check_elements,
    evaluate_model,
    evaluate_splits,
    evaluating,
)
from flt_mol.structures import Structures


class Fake(nn.Module):
    """Energy = weight · Σ z, float32; wrong in training mode."""

    def __init__(self, seen=(1, 6, 8, 29)):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.1, dtype=torch.float32))
        self.inner = nn.Dropout(0.5)
        self.register_buffer("elements_seen", torch.zeros(119, dtype=torch.bool))
        self.elements_seen[list(seen)] = True
        self.sizes: list[int] = []

    def forward(self, structures):
        self.sizes.append(len(structures))
        z = structures.atomic_numbers.to(torch.float32)
        total = torch.zeros(len(structures), dtype=torch.float32)
        energy = self.inner(self.weight * total.index_add(0, structures.system, z))
        return {"energy": energy}


class Data(Dataset):
    """As a loader of files gives it; indexing beyond the end is an error, not IndexError."""

    path = "/data/some/val_id.lmdb"

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        if index >= len(self.items):
            raise KeyError(index)
        return self.items[index]


def system(sid, numbers, energy=None):
    return Structures.single(numbers, torch.zeros(len(numbers), 3), sid=sid, energy=energy)


@pytest.fixture
def items():
    """Predictions 0.7, 1.4, 2.9 and 0; errors -0.01, +0.3, 0.1 and -0.02."""
    return [
        system(11, [1, 6], 0.71),
        system(12, [6, 8], 1.1),
        system("slab-3", [29], 2.8),
        system(14, [], 0.02),
    ]


def test_values_in_closed_form(items):
    result = evaluate_model(Fake(), Data(items))
    assert result.sid == (11, 12, "slab-3", 14)
    assert result.prediction.dtype == result.target.dtype == np.float64
    np.testing.assert_allclose(result.prediction, [0.7, 1.4, 2.9, 0], atol=1e-6)
    assert result.target.tolist() == [0.71, 1.1, 2.8, 0.02]
    np.testing.assert_allclose(result.error, [-0.01, 0.3, 0.1, -0.02], atol=1e-6)
    assert result.metrics["count"] == 4
    assert result.metrics["mae"] == pytest.approx(0.43 / 4, abs=1e-6)
    assert result.metrics["ewt"] == 0.25
    assert result.path == "/data/some/val_id.lmdb"
    assert result.unseen == ()


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 100])
def test_batch_sizes_give_the_same_numbers(items, batch_size):
    model = Fake()
    result = evaluate_model(model, Data(items), batch_size)
    whole = evaluate_model(Fake(), [Structures.cat(items)], 1)
    assert max(model.sizes) == min(batch_size, 4)
    assert len(model.sizes) == -(-4 // batch_size)
    np.testing.assert_array_equal(result.prediction, whole.prediction)
    assert result.metrics == pytest.approx(whole.metrics, rel=1e-12)


def test_loaders_generators_and_batches_are_sources_too(items):
    wanted = evaluate_model(Fake(), Data(items)).metrics
    seen = []
    loader = DataLoader(Data(items), batch_size=3, collate_fn=Structures.cat)
    result = evaluate_model(Fake(), loader, progress=lambda *numbers: seen.append(numbers))
    assert result.metrics == pytest.approx(wanted)
    assert result.path == Data.path
    assert seen == [(3, 4), (4, 4)]
    seen.clear()
    generator = (item for item in items)
    result = evaluate_model(Fake(), generator, 3, progress=lambda *numbers: seen.append(numbers))
    assert result.metrics == pytest.approx(wanted)
    assert seen == [(3, None), (4, None)]
    assert evaluate_model(Fake(), Structures.cat(items)).metrics == pytest.approx(wanted)


def test_functions_are_models_too(items):
    result = evaluate_model(lambda s: torch.full((len(s),), 1.1, dtype=torch.float64), items)
    assert result.metrics["mae"] == pytest.approx((0.39 + 0 + 1.7 + 1.08) / 4)


@pytest.mark.parametrize("training", [True, False])
def test_flags_are_restored_and_gradients_off(items, training):
    model = Fake().train(training)
    model.inner.train(not training)
    result = evaluate_model(model, items)
    np.testing.assert_allclose(result.prediction, [0.7, 1.4, 2.9, 0], atol=1e-6)
    assert (model.training, model.inner.training) == (training, not training)
    with pytest.raises(ZeroDivisionError), evaluating(model):
        assert not model.training | model.inner.training | 1 // 0
    assert (model.training, model.inner.training) == (training, not training)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_no_targets(items, batch_size):
    items[2] = system(99, [29])
    with pytest.raises(ValueError, match=r"this split has no targets: /data/some/.* sid 99"):
        evaluate_model(Fake(), Data(items), batch_size)
    loader = DataLoader(Data(items), batch_size=3, collate_fn=Structures.cat)
    with pytest.raises(ValueError, match=r"this split has no targets: /data/some"):
        evaluate_model(Fake(), loader)


def test_no_systems():
    with pytest.raises(ValueError, match=r"no systems to evaluate in /data/some/val_id.lmdb"):
        evaluate_model(Fake(), Data([]))


def test_target_that_is_nan_is_named(items):
    items[1] = system(666, [1], float("nan"))
    with pytest.raises(ValueError, match="target nan .* sid 666"):
        evaluate_model(Fake(), items)


@pytest.mark.parametrize(
    "wrong",
    [lambda s: torch.zeros(1), lambda s: torch.zeros(4, 4), lambda s: torch.zeros(1, 4)],
)
def test_model_with_wrong_shape(items, wrong):
    with pytest.raises(ValueError, match=r"energies for 4 systems|shape"):
        evaluate_model(wrong, items)


def test_column_of_energies(items):
    column = evaluate_model(lambda s: {"energy": Fake().eval()(s)["energy"][:, None]}, items)
    assert column.metrics == evaluate_model(Fake(), items).metrics


def test_batch_size_zero(items):
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        evaluate_model(Fake(), items, 0)
    for wrong in (2.5, True, None):
        with pytest.raises(ValueError, match="batch_size must be a whole number"):
            evaluate_model(Fake(), items, wrong)
        with pytest.raises(ValueError, match="keep_worst must be a whole number"):
            evaluate_model(Fake(), items, keep_worst=wrong)


def test_unseen_elements_are_named_once(items):
    items.append(system(15, [40, 26], 1.0))
    with pytest.warns(UserWarning, match="never trained on: Fe, Zr") as caught:
        result = evaluate_model(Fake(), items, 1)
    assert len(caught) == 1
    assert result.unseen == ("Fe", "Zr")
    with pytest.warns(UserWarning, match=r"never trained on: Cu, Fe, Zr\.") as caught:
        results = evaluate_splits(Fake(seen=[1, 6, 8]), {"a": items[:3], "b": items}, 2)
    assert len(caught) == 1
    assert results["a"].unseen == ("Cu",)


def test_check_elements():
    assert check_elements(Fake(), torch.tensor([29, 1, 118, 3, 3])) == ["Li", "Og"]
    assert check_elements(Fake(), np.array([1, 8], dtype=np.uint8)) == []
    assert check_elements(Fake(), {26}) == ["Fe"]
    assert check_elements(nn.Linear(1, 1), [26]) == []
    with pytest.raises(ValueError, match=r"\[0, 119\] are not elements"):
        check_elements(Fake(), [0, 1, 119])


def test_splits_and_their_progress(items):
    seen = []
    results = evaluate_splits(
        Fake(), {"b": items, "a": items[:1]}, 3, progress=lambda *numbers: seen.append(numbers)
    )
    assert list(results) == ["b", "a"]
    assert seen == [("b", 3, 4), ("b", 4, 4), ("a", 1, 1)]
    assert maes(results) == {split: result.metrics["mae"] for split, result in results.items()}


def test_csv_reads_back_exactly(tmp_path, items):
    results = evaluate_splits(Fake(), {"val_id": items, "b": items[:1]})
    path = write_csv(results, tmp_path / "p.csv")
    with path.open(newline="") as f:
        rows = list(csv.DictReader(f))
    assert list(rows[0]) == ["split", "sid", "energy", "target", "natoms", "elements"]
    assert [(row["split"], row["sid"]) for row in rows[2:]] == [
        ("val_id", "slab-3"),
        ("val_id", "14"),
        ("b", "11"),
    ]
    assert float(rows[0]["energy"]) == results["val_id"].prediction[0]
    assert rows[1]["elements"] == "C O"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "r.csv"
    path.write_text("old")
    bad = SplitResult((1, 2), np.array([0.1]), np.array([0.2]), {}, "")
    with pytest.raises(ValueError, match="zip"):
        write_csv({"val": bad}, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_worst_systems_are_kept(items, batch_size):
    result = evaluate_model(Fake(), items, batch_size, keep_worst=2)
    assert [structure.sid[0] for structure in result.worst] == [12, "slab-3"]
    assert evaluate_model(Fake(), items).worst == ()
    assert len(evaluate_model(Fake(), items, keep_worst=20).worst) == 4


def test_columns_and_median(items):
    result = evaluate_model(Fake(), items, 3)
    assert result.columns == {"natoms": (2, 2, 1, 0), "elements": ("C H", "C O", "Cu", None)}
    assert result.metrics["median_ae"] == pytest.approx((0.1 + 0.02) / 2, abs=1e-6)


def test_importing_evaluation_loads_nothing_heavy():
    code = (
        "import sys, flt_mol.evaluation; "
        "print([m for m in ('matplotlib', 'ase', 'lmdb', 'rich', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_targets_far_off_are_told_by_sid():
    targets = {"a": -1.0, "b": -1.5, "c": -5332.0, "d": -0.5}
    items = {sid: system(sid, [1, 6], energy) for sid, energy in targets.items()}
    message = r"1 of 4 energies are far off the others \(sid c: -5332 eV; median -1.25 eV\), as"
    with pytest.warns(UserWarning, match=f"split 'mine': {message}.* the scale of the errors"):
        evaluate_splits(Fake(), {"mine": Data(list(items.values()))})
    with pytest.warns(UserWarning, match=message):
        evaluate_model(Fake(), Data(list(items.values())))
    del items["c"]
    evaluate_splits(Fake(), {"mine": Data(list(items.values()))})
