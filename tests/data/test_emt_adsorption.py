"""The shipped data set emt_adsorption: its files, its energies by ASE, the script that made it."""

import hashlib
import importlib.util
import pickle
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from ase import Atoms
from ase.build import molecule
from ase.calculators.emt import EMT
from ase.optimize import BFGS

from flt_mol.data.recipes import recipe as find

FOLDER = Path(__file__).parents[2] / "datasets" / "emt_adsorption"
SPLITS = ("train", "val_id", "val_ood_ads", "val_ood_cat", "val_ood_both")


@pytest.fixture(scope="module")
def recipe():
    return find(FOLDER)


@pytest.fixture(scope="module")
def splits(recipe):
    datasets = {split: recipe.open(split, require_energy=True) for split in SPLITS}
    return {split: dataset.batch(range(len(dataset))) for split, dataset in datasets.items()}


@pytest.fixture(scope="module")
def make():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("make_emt", FOLDER / "make.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_emt"] = module
    spec.loader.exec_module(module)
    return module


def sample(splits, count):
    rng = np.random.default_rng(0)
    for systems in splits.values():
        for index in rng.choice(len(systems), size=count, replace=False):
            yield systems[int(index)]


def atoms_of(system, positions):
    return Atoms(
        system.atomic_numbers.numpy(),
        positions=positions.double().numpy(),
        cell=system.cell[0].double().numpy(),
        pbc=True,
        calculator=EMT(),
    )


def test_files_are_those_of_the_description(recipe):
    for split, about in recipe.metadata["splits"].items():
        content = recipe.path(split).read_bytes()
        assert len(content) == about["bytes"]
        assert hashlib.sha256(content).hexdigest() == about["sha256"]
        assert len(recipe.open(split)) == about["count"]


def test_energies_are_those_of_ase(splits):
    gas = {}
    for name in ("H2", "N2", "H2O", "CO"):
        atoms = molecule(name)
        atoms.calc = EMT()
        BFGS(atoms, logfile=None).run(fmax=1e-3, steps=500)
        gas[name] = atoms.get_potential_energy()
    oxygen = gas["H2O"] - gas["H2"]
    gas = {1: gas["H2"] / 2, 6: gas["CO"] - oxygen, 7: gas["N2"] / 2, 8: oxygen}
    for system in sample(splits, 3):
        start, relaxed = (atoms_of(system, p) for p in (system.positions, system.positions_relaxed))
        slab = start[(system.tags < 2).numpy()]
        slab.calc = EMT()
        zero = slab.get_potential_energy()
        zero += sum(gas[z] for z in system.atomic_numbers[system.tags == 2].tolist())
        for atoms, energy in ((start, system.energy_initial), (relaxed, system.energy)):
            assert atoms.get_potential_energy() - zero == pytest.approx(energy.item(), abs=1e-4)
        free = ~system.fixed.numpy()
        assert np.linalg.norm(relaxed.get_forces()[free], axis=1).max() < 0.06
        assert np.linalg.norm(slab.get_forces()[free[: len(slab)]], axis=1).max() < 0.02


def test_fields(splits):
    for systems in splits.values():
        assert torch.equal(systems.fixed, systems.tags == 0)
        fixed = systems.fixed
        assert torch.equal(systems.positions[fixed], systems.positions_relaxed[fixed])
        assert float((systems.positions_relaxed - systems.positions).norm(dim=1).max()) < 5.0
        assert bool(systems.pbc.all())
        assert float((systems.energy - systems.energy_initial).max()) <= 1e-3
        assert 8 <= int(systems.natoms.min()) <= int(systems.natoms.max()) <= 52


def test_what_is_held_out(splits, recipe):
    slabs = {split: set(systems.info["slab"]) for split, systems in splits.items()}
    assert all(not slabs[a] & slabs[b] for a, b in combinations(SPLITS, 2))
    sids = [sid for systems in splits.values() for sid in systems.sid]
    assert len(set(sids)) == len(sids)
    names = {split: set(systems.info["adsorbate"]) for split, systems in splits.items()}
    trained, held_out = (set(recipe.metadata["adsorbates"][k]) for k in ("trained", "held_out"))
    assert names["train"] == names["val_id"] == names["val_ood_cat"] == trained
    assert names["val_ood_ads"] == names["val_ood_both"] == held_out
    symbols = {"Al": 13, "Ni": 28, "Cu": 29, "Pd": 46, "Ag": 47, "Pt": 78, "Au": 79}
    pairs = [{symbols[a], symbols[b]} for a, b in recipe.metadata["alloys"]["held_out_pairs"]]
    for split, systems in splits.items():
        for system in systems:
            metals = set(system.atomic_numbers[system.tags < 2].tolist())
            assert any(pair <= metals for pair in pairs) == (split in SPLITS[3:])


def test_normalizer(recipe, splits):
    energies, normalizer = splits["train"].energy, recipe.metadata["normalizer"]
    assert normalizer["mean"] == pytest.approx(float(energies.mean()), abs=1e-9)
    assert normalizer["std"] == pytest.approx(float(energies.std(correction=0)), abs=1e-9)


def records_of(recipe, split):
    """As the script stores them; pickles of our own."""
    code = (
        "import lmdb, pickle, sys, zlib\n"
        "e = lmdb.open(sys.argv[1], subdir=False, readonly=True, lock=False)\n"
        "with e.begin() as t:\n"
        "    n = pickle.loads(t.get(b'length'))\n"
        "    v = [pickle.loads(zlib.decompress(t.get(str(i).encode()))) for i in range(n)]\n"
        "sys.stdout.buffer.write(pickle.dumps(v))\n"
    )  # in a process of its own, as LMDB opens a file once in each
    command = [sys.executable, "-c", code, str(recipe.path(split))]
    return pickle.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def test_the_writer_gives_the_shipped_bytes(recipe, make, tmp_path):
    make.write_lmdb(tmp_path / "a.lmdb", records_of(recipe, "val_id"))
    digest = hashlib.sha256((tmp_path / "a.lmdb").read_bytes()).hexdigest()
    assert digest == recipe.metadata["splits"]["val_id"]["sha256"]


def test_the_description_is_that_of_the_script(recipe, make):
    splits = {split: records_of(recipe, split) for split in SPLITS}
    stored = yaml.safe_load((FOLDER / "dataset.yaml").read_text())
    for split, baselines in make._baselines(splits).items():
        for name, numbers in baselines.items():
            assert numbers == pytest.approx(stored["baselines"][split][name], abs=1e-5)
    for split, records in splits.items():
        assert make.content_digest(records) == stored["splits"][split]["sha256_of_content"]
    for name, value in make.HEAD.items():
        assert stored[name] == value
    assert stored["fields"] == make.FIELDS
    assert stored["generator"]["command"].startswith("python datasets/emt_adsorption/make.py")
    rules = {name: about["rule"] for name, about in stored["filters"]["dropped"].items()}
    assert rules == make.RULES


@pytest.mark.slow
@pytest.mark.parametrize("slab", [0, 17, 100_003, 200_001, 300_002, 400_002])
def test_slabs_made_again(slab, recipe, make):
    """Positions to the bit; energies to the rounding of another processor."""
    made = make.make_slab_systems(recipe.metadata["generator"]["seed"], slab)
    shipped = [r for r in records_of(recipe, made["split"]) if r["slab"] == slab]
    assert len(shipped) == len(made["records"])
    for old, new in zip(shipped, map(make.to_record, made["records"]), strict=True):
        for name, value in old.items():
            if name.startswith("y_"):
                assert new[name] == pytest.approx(value, abs=1e-9)
            else:
                assert np.array_equal(new[name], value)
                assert getattr(new[name], "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.slow
def test_the_whole_script(tmp_path):
    command = [sys.executable, FOLDER / "make.py", tmp_path, "--num-slabs", "5", "--workers", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    found = find(tmp_path)
    assert sum(len(found.open(split)) for split in found.splits) > 5
    assert not (tmp_path / "work").exists()
