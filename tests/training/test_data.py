"""Splits of a run: where they are, what is invalid, what is held out, what is shared."""

import warnings
from dataclasses import replace
from operator import methodcaller

import ase.io
import pytest
import torch
from ase.io.extxyz import write_extxyz

from flt_mol.training import data
from flt_mol.training.data import (
    data_digest,
    load_splits,
    open_split,
    split_loader,
)
from flt_mol.training.processes import World
from helpers.training import ALL_OUTPUTS, SMALL, relaxations, tiny_run

ALONE = World(1, 1, 0)


def test_a_split_without_a_file_says_what_to_set(tmp_path):
    run = tiny_run(tmp_path, data={"validation": "other"})
    with pytest.raises(ValueError, match=r"'other'.*data\.paths\.other"):
        open_split(run, "other")


def test_systems_of_one_sid_are_held_out_together(tmp_path, monkeypatch):
    run = tiny_run(tmp_path, 8, data={"validation_fraction": 0.25})
    systems = [replace(x, sid=(f"s{i % 4}",)) for i, x in enumerate(data._load(run, "train"))]
    monkeypatch.setattr(data, "_load", lambda config, split: systems)
    training, validation = (data.sids_of(split) for split in load_splits(run))
    assert (len(training), len(validation), len({*training} | {*validation})) == (6, 2, 4)
    assert not {*training} & {*validation}


@pytest.mark.parametrize("name", ["pos_relaxed", "y_init"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_records_without_a_target(tmp_path, monkeypatch, name, in_memory):
    if not in_memory:
        monkeypatch.setattr(data, "_IN_MEMORY", 1)
    run = tiny_run(tmp_path, model=ALL_OUTPUTS, lacking={3: name})
    output = "displacement" if name == "pos_relaxed" else "energy_initial"
    with pytest.raises(ValueError, match=rf"slab-3.*{output}.*{name}.*model.outputs=\[energy"):
        open_split(run, "train").read_through()
    if in_memory:
        with pytest.raises(ValueError, match="slab-3"):
            load_splits(run)
    run.data.skip_bad = True
    with pytest.warns(UserWarning, match=r"1 of 5 records[\s\S]*slab-3"):
        training, validation = load_splits(run)
    assert [str(x.sid[0]) for x in (training[i] for i in range(4))] == [
        "slab-0",
        "slab-1",
        "slab-2",
        "slab-4",
    ]
    assert len(validation) == 2
    assert isinstance(training, list) == in_memory


@pytest.mark.parametrize("renamed", [True, False])
def test_systems_of_both_splits_are_noticed(tmp_path, renamed):
    run = tiny_run(tmp_path)
    frames = ase.io.read(tmp_path / "train.extxyz", index="1:3")
    for i, frame in enumerate(frames):
        frame.info["sid"] = f"other-{i}" if renamed else f"slab-{i}"
        frame.positions[0, 0] += 0.0 if renamed else 1.0
    write_extxyz(tmp_path / "val.extxyz", frames)
    with pytest.warns(UserWarning, match=r"^2 of 2 validation systems have the sids or"):
        load_splits(run)


def test_what_is_not_needed_may_be_missing(tmp_path):
    run = tiny_run(tmp_path, lacking={3: "pos_relaxed", 0: "y_init"})
    assert len(load_splits(run)[0]) == 5


def test_interpolation_asks_for_relaxed_positions_of_the_training_split_alone(tmp_path):
    run = tiny_run(tmp_path, lacking={3: "pos_relaxed"}, interpolation=0.5)
    with pytest.raises(ValueError, match=r"slab-3.*training.interpolation=0"):
        load_splits(run)
    run = tiny_run(tmp_path, lacking={6: "pos_relaxed"}, interpolation=0.5)
    load_splits(run)


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_share_is_held_out_by_seed(tmp_path, monkeypatch, in_memory):
    if not in_memory:
        monkeypatch.setattr(data, "_IN_MEMORY", 1)

    def split(seed):
        held_out = {"validation_fraction": 0.25, "validation_seed": seed}
        run = tiny_run(tmp_path, 10, data=held_out, seed=5 - seed)
        kept, held = load_splits(run)
        return [str(kept[i].sid[0]) for i in range(len(kept))], [
            str(held[i].sid[0]) for i in range(len(held))
        ]

    kept, held = split(0)
    assert len(held) == 2
    assert sorted(kept + held) == sorted(f"slab-{i}" for i in range(10))
    assert split(0) == (kept, held)
    assert any(split(seed) != (kept, held) for seed in (1, 2))


def test_nothing_left_to_train_on(tmp_path):
    run = tiny_run(tmp_path, 1, data={"validation_fraction": 0.5})
    with pytest.raises(ValueError, match="1 systems.*data.paths.val"):
        load_splits(run)


def test_shared_sids_are_warned_of(tmp_path):
    run = tiny_run(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_splits(run)
    relaxations(tmp_path / "val.extxyz", 4, first=3)
    with pytest.warns(UserWarning, match=r"2 of 4 .*slab-3, slab-4"):
        load_splits(run)


def test_the_digest_changes_with_the_data(tmp_path):
    splits = load_splits(tiny_run(tmp_path))
    before = data_digest(splits, 1)
    assert data_digest(load_splits(tiny_run(tmp_path)), 1) == before
    assert data_digest(splits, 2) != before
    for field in ("positions", "energy"):
        other = list(splits.training)
        value = getattr(other[1], field).clone()
        value[0] += 1e-3
        other[1] = replace(other[1], **{field: value})
        assert data_digest(splits._replace(training=other), 1) != before


def test_pairs_of_small_splits_are_searched_once(tmp_path, monkeypatch):
    run = tiny_run(tmp_path, model=ALL_OUTPUTS)
    training, _ = load_splits(run)
    pairs = methodcaller("with_pairs", 3.5)
    loader = split_loader(training, run.training, ALONE, pairs)
    first, again = ([x.pairs.index_i for x in loader] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(one.pairs is not None for one in loader.dataset.systems)
    monkeypatch.setattr(data, "_ATTACHED_IN_MEMORY", 10)
    loader = split_loader(training, run.training, ALONE, pairs)
    assert all(one.pairs is None for one in loader.dataset.systems)
    assert all(torch.equal(a, x.pairs.index_i) for a, x in zip(first, loader, strict=True))


def test_a_budget_of_atoms(tmp_path):
    run = tiny_run(tmp_path, model=SMALL, batch_atoms=11)
    training, _ = load_splits(run)
    sizes = [len(x) for x in split_loader(training, run.training, ALONE)]
    assert sizes == [2, 2, 1]
    run.training.batch_atoms = 4
    with pytest.raises(ValueError, match=r"slab-.* has 5 atoms"):
        split_loader(training, run.training, ALONE)


def test_forces_belong_to_the_energy_of_the_positions_shown(tmp_path):
    """Records of relaxations hold forces before them, and the energy after; or no forces."""
    model = {**SMALL, "rpe": None, "pairs": {"cutoff": 3.5}, "outputs": ["energy", "forces"]}
    run = tiny_run(tmp_path, model=model)
    with pytest.raises(ValueError, match=r"slab-0.*forces.*model.outputs=\[energy\]"):
        open_split(run, "train").read_through()
    frames = ase.io.read(tmp_path / "train.extxyz", ":")
    for atoms in frames:
        atoms.arrays["forces"] = atoms.positions * 0.5
    write_extxyz(tmp_path / "train.extxyz", frames)
    with pytest.raises(ValueError, match=r"slab-0.*y_relaxed.*data.energy"):
        open_split(run, "train").read_through()
    run.data.energy = "y_init"
    first = open_split(run, "train")[0]
    assert first.energy == frames[0].info["y_init"]
    torch.testing.assert_close(first.forces.double(), torch.tensor(frames[0].positions) * 0.5)
