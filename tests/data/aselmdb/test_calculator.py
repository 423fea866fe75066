"""Rows that hold a calculator's energy, and rows whose data hold one of that name."""

import pytest
from ase.build import molecule

from flt_mol.data import open_dataset
from flt_mol.data.aselmdb.rows import Row

WATER = molecule("H2O")
ROW = {"numbers": WATER.numbers, "positions": WATER.positions, "energy": -14.0}


@pytest.mark.parametrize(
    ("row", "of_calculator"),
    [
        (ROW, True),
        ({**ROW, "data": {"energy": -0.5}}, False),
        ({**ROW, "key_value_pairs": {"energy": -0.5}}, False),
    ],
)
def test_whose_energy_it_is(row, of_calculator):
    found = Row(row, "row 1")
    assert found.of_calculator("energy") == of_calculator
    assert not found.of_calculator("calculator")
    assert not found.of_calculator("sid")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_total_energy_is_refused_as_energy(tmp_path):
    from flt_mol.data.aselmdb.dataset import encode_row, write_aselmdb

    record = {
        "sid": 1,
        "pos": WATER.positions,
        "atomic_numbers": WATER.numbers,
        "calculator": -14.0,
    }
    write_aselmdb(tmp_path / "a.aselmdb", [encode_row(record, "record")])
    with pytest.raises(ValueError, match="energy is what a calculator found"):
        open_dataset(tmp_path / "a.aselmdb", energy="energy")[0]
    found = open_dataset(tmp_path / "a.aselmdb", energy="calculator")
    assert found[0].energy.tolist() == [-14.0]
