"""The shipped data set emt_relaxations: energies and forces by ASE, splits, the script."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.emt import EMT

from flt_mol.data.recipes import recipe as find
from flt_mol.files import shipped_folder

SPLITS = ("train", "tuning", "val_id", "val_ood_cat")
FOLDER = shipped_folder("datasets") / "emt_relaxations"


@pytest.fixture(scope="module")
def splits():
    datasets = {s: find(FOLDER).open(s, forces=True, require_energy=True) for s in SPLITS}
    return {split: dataset.batch(range(len(dataset))) for split, dataset in datasets.items()}


def test_size_and_counts(splits):
    recipe = find("emt-relaxations")
    assert set(recipe.splits) == set(SPLITS)
    assert sum(recipe.path(split).stat().st_size for split in SPLITS) <= 4_000_000
    for split, systems in splits.items():
        assert len(systems) == recipe.expected(split)["count"]
        assert len(set(systems.sid)) == len(systems)


def test_energies_and_forces_are_those_of_ase(splits):
    rng = np.random.default_rng(0)
    for systems in splits.values():
        for b in rng.choice(len(systems), 6, replace=False):
            frame = systems[int(b)]
            atoms = Atoms(
                frame.atomic_numbers.numpy(),
                frame.positions.double().numpy(),
                cell=frame.cell[0].double().numpy(),
                pbc=True,
                calculator=EMT(),
            )
            assert frame.energy.item() == pytest.approx(atoms.get_potential_energy(), abs=1e-8)
            free, forces = ~frame.fixed.numpy(), atoms.get_forces()
            np.testing.assert_allclose(frame.forces[free], forces[free], rtol=1e-3, atol=1e-4)
            assert not frame.forces[~free].any()


def test_fixed_atoms_stay_and_others_move(splits):
    systems = splits["val_id"]
    frames = {}
    for b, sid in enumerate(systems.sid):
        frames.setdefault(sid.partition("#")[0], []).append(systems[b])
    for relaxation in frames.values():
        first = relaxation[0]
        for other in relaxation[1:]:
            moved = (other.positions - first.positions).norm(dim=1)
            assert not moved[first.fixed].any()
            assert moved.max() > 1e-3


def test_what_chooses_is_not_what_is_reported(splits):
    slabs = {
        split: {int(sid.partition("#")[0]) // 10 for sid in splits[split].sid} for split in SPLITS
    }
    for split in SPLITS[1:]:
        assert all(slabs[split].isdisjoint(slabs[other]) for other in SPLITS if other != split)


def test_unseen_alloys_and_forces_that_are_not_small(splits):
    assert torch.equal(splits["train"].fixed, splits["train"].tags == 0)
    for systems in splits.values():
        assert systems.forces[~systems.fixed].norm(dim=1).mean() > 0.6
    held_out = ({29, 78}, {47, 46}, {13, 28})
    for split, systems in splits.items():
        for system in systems:
            metals = set(system.atomic_numbers[system.tags != 2].tolist())
            assert any(pair <= metals for pair in held_out) == (split == "val_ood_cat")


def by_name(dataset):
    records = map(dataset.record, range(len(dataset)))
    return {(record["sid"], record["fid"]): record for record in records}


@pytest.mark.slow
def test_the_script_makes_the_same_records(tmp_path):
    script = FOLDER / "make.py"
    if not script.is_file():
        pytest.skip("the script is in the checkout only")
    command = [sys.executable, str(script), str(tmp_path), "--slabs", "3", "--workers", "1"]
    subprocess.run(command, check=True, capture_output=True)
    for split in SPLITS:
        shipped, again = (by_name(find(of).open(split)) for of in (FOLDER, tmp_path))
        assert 9 <= len(again) <= 18
        kept = [name for name in again if name in shipped and shipped[name]["step"] != -2]
        # Some systems of training have frames of a relaxation by a model instead.
        assert len(kept) == len(again) or (split == "train" and len(kept) >= 9)
        for name in kept:
            one, other = shipped[name], again[name]
            assert one.keys() == other.keys()
            np.testing.assert_allclose(one["pos"], other["pos"], atol=1e-3)
            assert one["y"] == pytest.approx(other["y"], abs=1e-3)
