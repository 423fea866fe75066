import numpy as np
import pytest

from flt_mol.data.tables import EnergyTable
from flt_mol.evaluation import check_submission, write_submission
from flt_mol.evaluation.submission import SPLITS, energy_lines

SIDS = {split: [f"{place}{i}" for i in (3, 1, 2)] for place, split in enumerate(SPLITS)}


@pytest.fixture
def tables(tmp_path):
    return {
        split: EnergyTable(
            tmp_path / f"{split}.csv", {("", sid): float(sid) / 10 for sid in SIDS[split]}
        )
        for split in SPLITS
    }


def test_each_energy_stays_beside_its_id(tables, tmp_path):
    path = write_submission(tables, tmp_path / "s.npz", SIDS)
    with np.load(path) as file:
        assert set(file.files) == {f"{x}_{what}" for x in SPLITS for what in ("ids", "energy")}
        for split in SPLITS:
            assert file[f"{split}_ids"].tolist() == SIDS[split]
            assert file[f"{split}_ids"].dtype.kind == "U"
            assert file[f"{split}_energy"].tolist() == [float(sid) / 10 for sid in SIDS[split]]
    found = check_submission(path, SIDS)
    assert [len(energy) for energy in found.values()] == [3, 3, 3, 3]


def test_splits_that_are_not_complete_are_refused(tables, tmp_path):
    path = tmp_path / "s.npz"
    with pytest.raises(ValueError, match=r"id has 3 systems, the test split has 24948"):
        write_submission(tables, path)
    del tables["ood_cat"].energies[("", SIDS["ood_cat"][1])]
    with pytest.raises(ValueError, match=rf"ood_cat lacks sid {SIDS['ood_cat'][1]}"):
        write_submission(tables, path, SIDS)
    tables["ood_cat"].energies[("", "99")] = 0.0
    with pytest.raises(ValueError, match=r"not of this split, sid 99"):
        write_submission(tables, path, SIDS)
    del tables["ood_cat"]
    with pytest.raises(ValueError, match="missing .*ood_cat_energy"):
        write_submission(tables, path, SIDS)
    assert not path.exists()


def test_the_suffix_is_npz(tables, tmp_path):
    with pytest.raises(ValueError, match=r"s\.csv"):
        write_submission(tables, tmp_path / "s.csv", SIDS)


CHANGES = {
    "missing .*id_ids": lambda arrays: arrays.pop("id_ids"),
    "not expected .*extra": lambda arrays: arrays.update(extra=np.zeros(3)),
    "id_ids is int64": lambda arrays: arrays.update(id_ids=np.arange(3)),
    "id_energy is int64": lambda arrays: arrays.update(id_energy=np.arange(3)),
    "shape": lambda arrays: arrays.update(id_energy=np.zeros((3, 1))),
    r"id_energy is float64 of shape \(2,\)": lambda arrays: arrays.update(id_energy=np.zeros(2)),
    "id repeats sid 03": lambda arrays: arrays.update(id_ids=np.array(["03", "03", "01"])),
    "id has an empty id": lambda arrays: arrays.update(id_ids=np.array(["03", " ", "01"])),
    "no finite energy for sid 01": lambda a: a.update(id_energy=np.array([0, np.nan, 0])),
    "Python objects": lambda arrays: arrays.update(id_ids=np.array([{}, 1, 2], dtype=object)),
}


@pytest.mark.parametrize("words", CHANGES)
def test_what_the_leaderboard_would_refuse_is_named(words, tables, tmp_path):
    path = write_submission(tables, tmp_path / "s.npz", SIDS)
    with np.load(path) as file:
        arrays = dict(file)
    CHANGES[words](arrays)
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=rf"s\.npz.*{words}"):
        check_submission(path, SIDS)


@pytest.mark.parametrize("data", [b"", b"text", b"PK\x03\x04" + bytes(30)])
def test_files_that_are_not_npz_are_refused(data, tmp_path):
    (tmp_path / "s.npz").write_bytes(data)
    with pytest.raises(ValueError, match=r"s\.npz"):
        check_submission(tmp_path / "s.npz")
    with pytest.raises(ValueError, match=r"none\.npz"):
        check_submission(tmp_path / "none.npz")


def test_energies_that_no_adsorption_has_are_warned_of():
    energies = {"id": np.array([-1.0, 0.5, 0.25]), "ood_ads": np.array([-812.0, -600.0, -1.0])}
    with pytest.warns(UserWarning, match="ood_ads: 2 of 3"):
        lines = energy_lines(energies)
    assert "-1.000 to 0.500 eV, median 0.250" in lines[0]
