"""`flt-mol predict`: tags, ensembles and outputs through the command line."""

import csv
import re

import ase.io
import pytest
from ase.build import add_adsorbate, fcc111
from slabs import platinum

from flt_mol import FLTCalculator, predict
from flt_mol.cli import main
from flt_mol.data import tag_slab

TAG = ["--tag-slab", "--surface", "half"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bare = platinum(tags=False)
    ase.io.write("POSCAR", bare, format="vasp")
    ase.io.write("slab.cif", bare)
    ase.io.write("slab.xyz", bare, format="xyz")
    ase.io.write("slab.extxyz", platinum())
    return tmp_path


@pytest.mark.usefixtures("place")
def test_files_without_tags_get_the_energies_of_tagged_ones(capsys):
    files = ["POSCAR", "slab.cif", "slab.extxyz"]
    assert main(["predict", "emt_small", *files, *TAG, "-o", "out.extxyz"]) == 0
    shown, err = capsys.readouterr()
    assert err == ""
    first, second, third, *_ = shown.splitlines()
    assert re.fullmatch(
        r"3 structures: -?\d+\.\d{3} to -?\d+\.\d{3} eV, median -?\d+\.\d{3}", first
    )
    assert second == "  2 × below 4, surface 8, adsorbate CO"
    assert third == "  1 × below 8, surface 4, adsorbate CO"
    assert main(["predict", "emt_small", *files, *TAG]) == 0
    first, _, third, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("eV  below 4, surface 8, adsorbate CO")
    assert third.endswith("eV  below 8, surface 4, adsorbate CO")
    frames = ase.io.read("out.extxyz", ":")
    for frame in frames:
        energy = frame.info["energy_predicted"]
        assert predict(frame, "emt_small")[0] == pytest.approx(energy, abs=1e-5)
        assert FLTCalculator("emt_small").get_potential_energy(frame) == pytest.approx(energy)
    expected = predict(tag_slab(platinum(tags=False), surface="half"), "emt_small")[0]
    assert frames[0].info["energy_predicted"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["POSCAR", "--adsorbate", "CO"], "--adsorbate says how to tag: give --tag-slab, too"),
        (["POSCAR", "--surface", "1"], "--surface says how to tag"),
        (["POSCAR", "--tag-slab", "--adsorbate", "NO"], "POSCAR: COPt12 has no NO"),
        (["POSCAR", "--tag-slab", "--adsorbate", "12,99"], "is to have [99]"),
        (["slab.xyz", "--tag-slab"], "slab.xyz: COPt12 is no slab"),
        (["POSCAR", "-o", "out.vasp"], "use a name ending in .csv or .json or .extxyz"),
        (["POSCAR", "--ensemble", "missing"], "no checkpoint at 'missing'"),
    ],
)
def test_what_cannot_work_is_refused(arguments, message, capsys):
    assert main(["predict", "emt_small", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("flt-mol: error: ")
    assert message in err


@pytest.mark.usefixtures("place")
def test_a_rule_that_is_none(capsys):
    for rule in ("top", "0"):
        with pytest.raises(SystemExit):
            main(["predict", "emt_small", "POSCAR", "--tag-slab", "--surface", rule])
        assert f"'{rule}' is not oc20, half or a number of layers" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("adsorbate", ["CO", "12,13", "none"])
def test_ways_to_name_the_adsorbate(adsorbate, capsys):
    ase.io.write("bare.traj", platinum(tags=False))
    more = ["--tag-slab", "--adsorbate", adsorbate]
    assert main(["predict", "emt_small", "bare.traj", *more]) == 0
    shown = capsys.readouterr().out.splitlines()[0]
    assert shown.endswith("adsorbate none" if adsorbate == "none" else "adsorbate CO")


@pytest.mark.usefixtures("place")
def test_slabs_that_cannot_be_tagged_are_left_out_on_request(capsys):
    arguments = ["predict", "emt_small", "slab.xyz", "POSCAR", *TAG, "--skip-bad", "-o", "o.extxyz"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "left out 1 structures" in captured.err
    assert "slab.xyz: COPt12 is no slab" in captured.err
    assert captured.out.startswith("1 structure: ")
    assert len(ase.io.read("o.extxyz", ":")) == 1


@pytest.mark.usefixtures("place")
def test_ensembles(capsys):
    more = ["--ensemble", "emt_performer_small", "-o", "o.csv"]
    assert main(["predict", "emt_small", "slab.extxyz", *more]) == 0
    assert "spread of the members: median " in capsys.readouterr().out
    assert main(["predict", "emt_small", "slab.extxyz", *more[:2]]) == 0
    assert " ± " in capsys.readouterr().out
    with open("o.csv", newline="") as f:
        (row,) = csv.DictReader(f)
    found = predict(platinum(), ["emt_small", "emt_performer_small"])
    assert float(row["energy"]) == pytest.approx(found.mean[0], abs=1e-5)
    assert float(row["spread"]) == pytest.approx(found.spread[0], abs=1e-5)


@pytest.mark.usefixtures("place")
def test_warnings_come_once(capsys):
    files = ["POSCAR", "slab.cif", "slab.xyz", "slab.extxyz"]
    more = ["--ensemble", "emt_performer_small", "--batch-size", "1"]
    assert main(["predict", "emt_small", *files, *more]) == 0
    err = capsys.readouterr().err
    assert err.count("warning") == 2
    assert "all tags are 0 in 3 of 4 structures (POSCAR, slab.cif, slab.xyz)" in err
    assert "no cell in 1 of 4 structures (slab.xyz)" in err


def test_without_o_nothing_is_written(place, capsys):
    before = sorted(path.name for path in place.iterdir())
    (place / "predictions.csv").write_text("mine")
    assert main(["predict", "emt_small", "slab.extxyz"]) == 0
    out = capsys.readouterr().out
    assert re.fullmatch(r"slab\.extxyz +-?\d+\.\d{6} eV\n", out)
    assert (place / "predictions.csv").read_text() == "mine"
    assert sorted(path.name for path in place.iterdir()) == sorted([*before, "predictions.csv"])


def test_what_is_read_is_not_overwritten(place, capsys):
    before = (place / "slab.extxyz").read_bytes()
    assert main(["predict", "emt_small", "POSCAR", "slab.extxyz", "-o", "./slab.extxyz"]) == 2
    assert "is one of the files to predict" in capsys.readouterr().err
    assert (place / "slab.extxyz").read_bytes() == before


@pytest.mark.parametrize("layers", [2, 3])
def test_layer_numbers_of_ase_build_are_set_anew(layers, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    slab = fcc111("Cu", (2, 2, layers), vacuum=8.0)
    add_adsorbate(slab, "O", 1.2, "fcc")
    ase.io.write("built.traj", slab)
    assert main(["predict", "flt-small", "built.traj", "--tag-slab", "-o", "o.extxyz"]) == 0
    shown, err = capsys.readouterr()
    assert err == "flt-mol: tagged by the rule 'half', that of emt_adsorption, which the model " + (
        "was trained on\n"
    )
    tagged = tag_slab(slab, surface="half")
    assert "surface 4, adsorbate O" in shown if layers == 2 else "surface 8, adsorbate O" in shown
    found = ase.io.read("o.extxyz")
    assert found.get_tags().tolist() == tagged.get_tags().tolist()
    expected = pytest.approx(predict(tagged, "flt-small")[0], abs=1e-4)
    assert found.info["energy_predicted"] == expected
    assert main(["predict", "flt-small", "built.traj"]) == (0 if layers == 2 else 2)
    err = capsys.readouterr().err
    assert "--tag-slab of flt-mol predict" in err
    assert "cannot read" not in err


@pytest.mark.usefixtures("place")
def test_many_are_summed_up_and_progress_is_told(capsys, monkeypatch):
    ase.io.write("many.traj", [platinum()] * 40)
    monkeypatch.setattr("flt_mol.commands._QUIET", 0.0)
    assert main(["predict", "emt_small", "many.traj", "-o", "o.csv", "--batch-size", "16"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert out.startswith("40 structures: ")
    assert err.splitlines() == [f"{n} of 40 structures predicted" for n in (16, 32, 40)]
    with open("o.csv") as file:
        assert len(list(csv.DictReader(file))) == 40


def test_energies_are_shown_when_the_file_cannot_be_written(place, capsys, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(type(place), "replace", full)
    assert main(["predict", "emt_small", "POSCAR", "slab.cif", *TAG, "-o", "o.extxyz"]) == 2
    assert re.search(r"slab.cif .* eV  below 4, surface 8, adsorbate CO", capsys.readouterr().out)
