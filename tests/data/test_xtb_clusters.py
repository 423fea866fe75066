"""The shipped data set xtb_clusters, and its script: placement, rigid relaxation, files."""

import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import yaml
from ase.build import molecule

from flt_mol.data.recipes import recipe as find

SCRIPT = Path(__file__).parents[2] / "datasets" / "xtb_clusters" / "make.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="the script is in the checkout only")
SPLITS = ("train", "val_id", "val_ood_mol", "val_ood_size", "val_far", "test")
with_xtb = pytest.mark.skipif(find_spec("tblite") is None, reason="needs tblite")


@pytest.fixture(scope="module")
def make():
    spec = spec_from_file_location("make_xtb_clusters", SCRIPT)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def splits():
    datasets = {s: find("xtb-clusters").open(s, require_energy=True) for s in SPLITS}
    return {split: dataset.batch(range(len(dataset))) for split, dataset in datasets.items()}


def owners(one):
    """Which molecule each atom of a system belongs to."""
    names = one.info["molecules"][0].split()
    sizes = [2 if name == "NaF" else len(molecule(name)) for name in names]
    assert sum(sizes) == one.num_atoms
    return np.repeat(np.arange(len(names)), sizes)


def test_size_counts_and_open_molecules(splits):
    recipe = find("xtb_clusters")
    assert sum(recipe.path(split).stat().st_size for split in SPLITS) <= 4_000_000
    sids = [sid for systems in splits.values() for sid in systems.sid]
    assert len(set(sids)) == len(sids) == sum(recipe.expected(s)["count"] for s in SPLITS)
    for systems in splits.values():
        assert not systems.pbc.any()
        assert not systems.cell.any()
        assert not systems.fixed.any()
        assert (systems.tags == 2).all()
        assert (systems.energy <= systems.energy_initial + 1e-4).all()


def test_molecules_of_the_shipped_splits(splits, make):
    held_out = set(make.HELD_OUT)
    for split, systems in splits.items():
        for text in systems.info["molecules"]:
            names = text.split()
            assert bool(held_out & set(names)) == (split == "val_ood_mol")
            assert (len(names) >= 8) == (split == "val_ood_size")


def test_no_atoms_of_far_fragments_are_near(splits):
    for one in splits["val_far"]:
        owner = owners(one)
        for positions in (one.positions, one.positions_relaxed):
            places = positions.double().numpy()
            distances = np.linalg.norm(places[:, None] - places, axis=-1)
            nearest = distances[owner[:, None] != owner].min()
            assert nearest > (5.99 if positions is one.positions else 2.5)


@with_xtb
def test_shipped_energies_are_those_of_xtb(splits, make):
    for split in ("val_id", "val_ood_mol", "val_far"):
        one = splits[split][3]
        reference = sum(make.relaxed_molecule(n)[1] for n in one.info["molecules"][0].split())
        again = make.energy(one.atomic_numbers.numpy(), one.positions.double().numpy())
        assert one.energy_initial.item() == pytest.approx(again - reference, abs=1e-4)


def drawn(make, split, index):
    rng = make.generator(0, split, index)
    names, loose = make.draw_molecules(split, rng)
    atoms = make.place(split, names, loose, rng)
    sizes = [len(make.relaxed_molecule(name)[0]) for name in names]
    return names, atoms, np.repeat(np.arange(len(names)), sizes), sizes


def test_who_is_in_which_split(make):
    for index in range(40):
        names = {s: drawn_names(make, s, index) for s in make.SPLITS}
        for split in ("train", "val_id", "test", "val_ood_size"):
            assert set(names[split]) <= set(make.TRAINED)
        assert set(names["val_ood_mol"]) & set(make.HELD_OUT)
        assert 8 <= len(names["val_ood_size"]) <= 12
        assert 2 <= len(names["train"]) <= 7
        assert set(names["val_far"]) <= set(make.POLAR)
        assert len(names["val_far"]) in (2, 3)


def drawn_names(make, split, index):
    return make.draw_molecules(split, make.generator(0, split, index))[0]


@with_xtb
def test_far_fragments_are_far_and_others_touch(make):
    for split in ("val_far", "val_ood_mol"):
        for index in range(12):
            _, atoms, owner, _ = drawn(make, split, index)
            others = owner[:, None] != owner
            distances = atoms.get_all_distances()
            reach = make.vdw_radii[atoms.numbers]
            if split == "val_far":
                assert distances[others].min() >= 6.0 - 2 * make.GRID
                assert distances[others].min() <= 15.0 + 2 * make.GRID
            else:
                ratio = (distances / (reach[:, None] + reach))[others].min()
                assert 0.74 <= ratio <= 1.11
            assert np.array_equal(drawn(make, split, index)[1].positions, atoms.positions)


@with_xtb
@pytest.mark.parametrize("held", [False, True])
def test_relaxation_lowers_the_energy_of_rigid_molecules(make, held):
    _, atoms, owner, sizes = drawn(make, "val_far" if held else "val_id", 1)
    start, before = atoms.positions.copy(), make.energy(atoms.numbers, atoms.positions)
    end, _ = make.relax(atoms.copy(), sizes, held=held)
    assert make.energy(atoms.numbers, end) < before - 0.01
    for m in range(len(sizes)):
        one, other = start[owner == m], end[owner == m]
        lengths = [np.linalg.norm(x[:, None] - x, axis=-1) for x in (one, other)]
        np.testing.assert_allclose(*lengths, atol=1e-9)
        moved = np.linalg.norm(other.mean(0) - one.mean(0))
        assert (moved < 1e-9) == held


@with_xtb
@pytest.mark.slow
def test_the_script_resumes_and_its_files_hold_what_xtb_finds(make, tmp_path):
    cache = tmp_path / "systems.jsonl"
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--fraction", "0.0003"]
    subprocess.run(command, check=True, capture_output=True)
    first = cache.read_bytes()
    cache.write_bytes(first[:-9])
    subprocess.run(command, check=True, capture_output=True)
    whole = [line for line in cache.read_bytes().splitlines() if line.endswith(b"}")]
    assert sorted(whole) == sorted(first.splitlines()[1:])
    content = yaml.safe_load((tmp_path / "dataset.yaml").read_text())
    found = find(tmp_path)
    for split in make.SPLITS:
        assert content["splits"][split]["count"] == 1
        one = found.open(split, require_energy=True)[0]
        assert not one.pbc.any()
        assert not one.cell.any()
        assert (one.tags == 2).all()
        assert not one.fixed.any()
        reference = sum(make.relaxed_molecule(n)[1] for n in one.info["molecules"][0].split())
        for energy, positions in (
            (one.energy_initial, one.positions),
            (one.energy, one.positions_relaxed),
        ):
            again = make.energy(one.atomic_numbers.numpy(), positions.double().numpy())
            assert energy.item() == pytest.approx(again - reference, abs=1e-5)
        assert one.energy < one.energy_initial
