"""Which targets `flt-mol evaluate` compares with."""

import pytest
from ase import Atoms
from ase.io import write

from flt_mol.data.catalog import recipe
from flt_mol.data.splits import open_splits


@pytest.fixture
def own_file(tmp_path):
    atoms = Atoms("CO", [[0, 0, 0], [0, 0, 1.1]], tags=[1, 2], cell=[9, 9, 9], pbc=True)
    atoms.info = {"e_ads": -1.5, "y_relaxed": -2.5}
    path = tmp_path / "own.extxyz"
    write(path, atoms)
    return path


@pytest.mark.parametrize(
    ("trained", "asked", "expected"),
    [
        ({"energy": "e_ads"}, None, -1.5),
        ({"energy": "e_ads"}, "y_relaxed", -2.5),
        ({"energy": "y_relaxed"}, None, -2.5),
        ({}, None, -2.5),
    ],
)
def test_a_file_holds_targets_under_the_name_of_training(own_file, trained, asked, expected):
    splits, _ = open_splits(own_file, None, trained, energy=asked)
    assert float(splits["own"][0].energy) == expected


def test_a_data_set_with_a_recipe_has_its_own_name():
    splits, _ = open_splits("emt_adsorption", ["val_id"], {"name": None, "energy": "e_ads"})
    assert splits["val_id"][0].energy is not None


def test_splits_that_are_not_here_are_told_of_together(tmp_path, monkeypatch):
    """Those of a run that trained with one file of OC20 and goes on to be evaluated."""
    monkeypatch.setenv("FLT_MOL_DATA", str(tmp_path))
    emt = recipe("emt_adsorption").path("val_id")
    run = {
        "name": "oc20_is2re",
        "paths": {"val_id": str(emt)},
        "evaluation": ["val_id", "val_ood_ads", "val_ood_cat"],
        "energy": "y_relaxed",
    }
    message = (
        r"no files of splits val_ood_ads, val_ood_cat of data set oc20_is2re; .*--split "
        r"val_ood_ads --split val_ood_cat.*; or take what is here: --split val_id$"
    )
    with pytest.raises(ValueError, match=message):
        open_splits(None, None, run)
    run["paths"]["val_ood_cat"] = str(emt)
    with pytest.raises(ValueError, match=r"what is here: --split val_id --split val_ood_cat$"):
        open_splits(None, None, run)
    splits, _ = open_splits(None, ["val_id"], run)
    assert list(splits) == ["val_id"]
