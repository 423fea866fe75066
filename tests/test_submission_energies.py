"""Energies of a submission: their range, and those that no adsorption has."""

import numpy as np
import pytest

from flt_mol.cli import main
from flt_mol.evaluation.submission import SPLITS
from flt_mol.submission_energies import EnergyRange, energy_ranges, warnings_of


def saved(path, **energies):
    content = {}
    for split in SPLITS:
        content[f"{split}_energy"] = np.asarray(energies.get(split, [-3.0, 1.0, -1.5, 0.0]))
        content[f"{split}_ids"] = np.array([f"{split}{i}" for i in range(4)])
    np.savez_compressed(path, **content)
    ids = path.with_suffix(".csv")
    rows = [f"{split},{split}{i}" for split in SPLITS for i in range(4)]
    ids.write_text("\n".join(["split,sid", *rows]))
    return [str(path), "--ids", str(ids)]


def test_by_hand(tmp_path):
    ranges = energy_ranges(saved(tmp_path / "a.npz", ood_ads=[-51.0, 50.0, 2.0, 3.0])[0])
    assert ranges["id"] == EnergyRange(4, -3.0, -0.75, 1.0, 0)
    assert ranges["ood_ads"] == EnergyRange(4, -51.0, 2.5, 50.0, 1)
    assert str(ranges["id"]) == "     4 systems, -3.000 to 1.000 eV, median -0.750"
    (only,) = warnings_of(ranges)
    assert only.startswith("ood_ads: 1 of 4 energies are beyond ±50 eV (median 2.5)")


@pytest.mark.parametrize(
    ("energies", "count"), [([-1200.0, 800.0, -500.0, 0.0], 3), ([1.0] * 4, 0)]
)
def test_the_command(tmp_path, capsys, energies, count):
    arguments = saved(tmp_path / "a.npz", id=energies)
    assert main(["submission", "check", *arguments]) == 0
    out, err = capsys.readouterr()
    assert f"id             4 systems, {min(energies):.3f} to " in out
    assert "a.npz is complete and sound" in out
    assert bool(count) == (f"warning: id: {count} of 4 energies are beyond ±50 eV" in err)
    assert bool(count) == bool(err)
