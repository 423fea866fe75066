"""Which targets `flt-mol evaluate` compares with."""

import pytest
from ase import Atoms
from ase.io import write

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
