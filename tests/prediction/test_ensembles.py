import json
import shutil
import warnings

import ase.io
import numpy as np
import pytest
import torch
from slabs import PLATINUM, ByHand, platinum

from flt_mol.data import from_ase
from flt_mol.models.energy import EnergyConfig, EnergyModel
from flt_mol.predict import predict, predict_files, predict_structures, write_predictions
from flt_mol.prediction.members import EnsembleEnergies, load_members
from flt_mol.training import checkpoints


def test_mean_and_spread_by_hand():
    """Factors 1, 2, 6: mean 3, and √((4 + 1 + 9) / 2) = √7."""
    atoms = [platinum(), platinum()[:13]]
    found = predict(atoms, [ByHand(1.0), ByHand(2.0), ByHand(6.0)], batch_size=1)
    assert isinstance(found, EnsembleEnergies)
    energies = np.array([PLATINUM, PLATINUM - 208])
    np.testing.assert_array_equal(found.members, np.outer([1, 2, 6], energies))
    np.testing.assert_allclose(found.mean, 3 * energies)
    np.testing.assert_allclose(found.spread, 7**0.5 * energies)
    assert len(found) == 2
    assert found.members.dtype == np.float64


def test_one_checkpoint_still_gives_an_array():
    assert isinstance(predict(platinum(), ByHand()), np.ndarray)
    structures = [from_ase(platinum())]
    assert predict_structures(ByHand(), structures).tolist() == [PLATINUM]
    assert predict_structures((ByHand(), ByHand()), structures).spread.tolist() == [0]


@pytest.mark.parametrize("members", [[], [ByHand()], ()])
def test_an_ensemble_has_two_members(members):
    with pytest.raises(ValueError, match="at least two members"):
        predict(platinum(), members)


def test_files_and_tables_have_the_spread(tmp_path):
    ase.io.write(tmp_path / "a.traj", [platinum(), platinum()])
    found = predict_files([ByHand(1.0), ByHand(3.0)], tmp_path / "a.traj")
    assert [p.energy for p in found] == [2 * PLATINUM] * 2
    assert [p.spread for p in found] == pytest.approx([2**0.5 * PLATINUM] * 2)
    header, *rows = write_predictions(found, tmp_path / "a.csv").read_text().splitlines()
    assert header == "sid,energy,spread,file"
    assert float(rows[1].split(",")[2]) == found[1].spread
    assert json.loads(write_predictions(found, tmp_path / "a.json").read_text())[0] == {
        "sid": "a.traj#0",
        "energy": 2.0 * PLATINUM,
        "spread": found[0].spread,
        "file": str(tmp_path / "a.traj"),
    }
    single = predict_files(ByHand(), tmp_path / "a.traj")
    assert write_predictions(single, tmp_path / "a.csv").read_text().startswith("sid,energy,file\n")


def test_flags_of_all_members_are_restored():
    members = [ByHand().train(), ByHand().eval()]
    predict(platinum(), members)
    assert [m.training for m in members] == [True, False]


@pytest.fixture
def saved(tmp_path):
    """Write a checkpoint trained on energies of that name."""

    def save(name, energy=None, seed=0):
        model = EnergyModel(EnergyConfig(embed_dim=8, num_heads=2, num_layers=1, seed=seed))
        model.mark_seen([6, 8, 78])
        data = {"name": "emt_adsorption"} | ({} if energy is None else {"energy": energy})
        return checkpoints.save_checkpoint(tmp_path / f"{name}.ckpt", model, {"data": data})

    return save


def test_every_checkpoint_is_loaded_once(saved, monkeypatch, tmp_path):
    asked = []
    load = checkpoints.load_model
    monkeypatch.setattr(
        checkpoints, "load_model", lambda name, **more: asked.append(name) or load(name, **more)
    )
    first, second = saved("a"), saved("b", seed=1)
    other_name = tmp_path / "x" / ".." / "a.ckpt"
    (tmp_path / "x").mkdir()
    with pytest.warns(UserWarning, match="a.ckpt: there twice") as caught:
        found = predict([platinum()] * 3, [first, second, other_name], batch_size=1)
    assert len(caught) == 1
    assert asked == [first, second]
    np.testing.assert_array_equal(found.members[0], found.members[2])
    assert not np.array_equal(found.members[0], found.members[1])


def test_copies_of_a_checkpoint_are_told(saved, tmp_path):
    first, copy = saved("a"), tmp_path / "copy.ckpt"
    shutil.copy(first, copy)
    with pytest.warns(UserWarning, match="copy.ckpt: there twice in the ensemble") as caught:
        predict(platinum(), [first, copy])
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(platinum(), [first, saved("b", seed=1)])


def test_members_trained_on_different_energies_are_refused(saved):
    relaxed, initial = saved("relaxed"), saved("initial", "y_init", seed=1)
    with pytest.raises(ValueError, match=r"y_relaxed \(.*relaxed.ckpt\), y_init \(.*initial"):
        predict(platinum(), [relaxed, initial])
    same = saved("same", "energy_relaxed", seed=2)
    assert len(predict(platinum(), (relaxed, same))) == 1
    modules = [checkpoints.load_model(path) for path in (relaxed, initial)]
    assert len(predict(platinum(), modules)) == 1


def test_elements_are_warned_of_by_member():
    members = [ByHand(seen=[78, 6, 8]), ByHand(seen=[78, 8])]
    with pytest.warns(
        UserWarning, match=r"never trained on: C\..*by member: member 1: C"
    ) as caught:
        predict([platinum()] * 3, members, batch_size=1)
    assert len(caught) == 1


def test_tags_are_warned_of_once_for_all_members():
    with pytest.warns(UserWarning, match="all tags are 0 in 2 of 2 structures") as caught:
        predict([platinum(tags=False)] * 2, [ByHand(), ByHand(2.0)], batch_size=1)
    assert len(caught) == 1


def test_narrow_cells_are_warned_of_where_one_member_does_not_see_images():
    narrow, members = platinum()[[11, 12, 13]], [ByHand(), ByHand(2.0)]
    narrow.set_cell(narrow.cell.array * [[0.5], [0.5], [1.0]])
    predict(narrow, members)
    members[1].sees_images = False
    with pytest.warns(UserWarning, match=r"narrower than 4 Å in 1 of 1"):
        predict(narrow, members)


def test_members_that_fail_are_named():
    with pytest.raises(ValueError, match=r"inf eV for structure 0 \(member 1\)"):
        predict(platinum(), [ByHand(), ByHand(torch.inf)])


def test_what_is_no_checkpoint_is_refused():
    with pytest.raises(ValueError, match="checkpoint is a dict, expected a path"):
        predict(platinum(), {})
    with pytest.raises(ValueError, match="no checkpoint at 'missing'"):
        predict(platinum(), [ByHand(), "missing"])


def test_devices_are_for_checkpoints(saved):
    path = saved("a")
    with pytest.raises(ValueError, match="no device is called 'foo'"):
        predict(platinum(), path, device="foo")
    with pytest.raises(ValueError, match="move a module yourself"):
        predict(platinum(), ByHand(), device="cpu")
    (model,) = load_members(path, "cpu").models
    assert next(model.parameters()).device.type == "cpu"
