"""Which rule tags are made by, where the user names none."""

import warnings

import ase.io
import pytest
import torch
import yaml
from slabs import PLATINUM, ByHand, platinum

from flt_mol import predict
from flt_mol.cli import main
from flt_mol.prediction import surface_rule
from flt_mol.training.checkpoints import find_checkpoint


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A file without tags, and a way to checkpoints that were trained on some data."""
    monkeypatch.chdir(tmp_path)
    ase.io.write("POSCAR", platinum(tags=False), format="vasp")
    content = torch.load(find_checkpoint("emt_small"), weights_only=True)

    def trained_on(file, more=None, **data):
        config = {
            **content["config"],
            "data": {**content["config"]["data"], **data},
            **(more or {}),
        }
        torch.save({**content, "config": config}, file)
        return file

    return trained_on


def test_rules_of_checkpoints(place, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    recipe = {"name": "steps", "tag_rule": 3, "splits": {"train": "a.lmdb"}}
    (own / "dataset.yaml").write_text(yaml.safe_dump(recipe))
    assert surface_rule("emt_small") == surface_rule("flt-small") == "half"
    assert surface_rule(place("a.ckpt", name="oc20-is2re")) == "oc20"
    assert surface_rule(place("a.ckpt", name=str(own))) == 3
    assert surface_rule(place("a.ckpt", name="moved")) is None
    assert surface_rule(place("a.ckpt", paths={"train": "mine.lmdb"})) is None
    assert surface_rule(place("a.ckpt", paths={"val_id": "mine.lmdb"})) == "half"
    assert surface_rule(ByHand()) is None
    assert surface_rule(["emt_small", place("a.ckpt", name="moved")]) == "half"
    with pytest.raises(ValueError, match=r"oc20 \(a.ckpt\), half \(emt_small\)"):
        surface_rule([place("a.ckpt", name="oc20_is2re"), "emt_small"])
    (own / "dataset.yaml").write_text(yaml.safe_dump({**recipe, "tag_rule": "top"}))
    with pytest.raises(ValueError, match="tag_rule is 'top', expected oc20, half or a number"):
        surface_rule(place("a.ckpt", name=str(own)))


@pytest.mark.parametrize(
    ("data", "more", "tags", "told"),
    [
        ({}, [], "below 4, surface 8", "flt-mol: tagged by the rule 'half', that of emt_adsorp"),
        ({"name": "oc20_is2re"}, [], "below 8, surface 4", "by the rule 'oc20', that of oc20_is2r"),
        ({"name": "x"}, [], "below 8, surface 4", "warning: tagged by the rule 'oc20': by which"),
        ({}, ["oc20"], "below 8, surface 4", "emt_adsorption, whose tags are by the rule 'half'"),
        ({}, ["half"], "below 4, surface 8", ""),
        ({"name": "x"}, ["half"], "below 4, surface 8", ""),
    ],
)
def test_the_command_takes_the_rule_of_the_training_data(place, capsys, data, more, tags, told):
    rule = ["--surface", *more] if more else []
    assert main(["predict", place("a.ckpt", **data), "POSCAR", "--tag-slab", *rule]) == 0
    out, err = capsys.readouterr()
    assert tags in out
    assert told in err
    assert bool(err) == bool(told)


def test_members_of_different_rules(place, capsys):
    arguments = ["predict", place("a.ckpt", name="oc20_is2re"), "POSCAR", "--tag-slab"]
    more = ["--ensemble", "emt_small"]
    assert main([*arguments, *more]) == 2
    assert "oc20 (a.ckpt), half (emt_small); say which" in capsys.readouterr().err
    assert main([*arguments, *more, "--surface", "half"]) == 0
    assert "oc20_is2re, whose tags are by the rule 'oc20'" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
def test_nothing_is_said_where_nothing_was_tagged(capsys):
    ase.io.write("tagged.traj", platinum())
    assert main(["predict", "emt_small", "tagged.traj", "--tag-slab"]) == 0
    assert capsys.readouterr().err == ""


def test_the_warning_of_missing_tags_names_the_rule():
    with pytest.warns(UserWarning, match=r"tag_slab\(atoms, surface='half'\)"):
        predict(platinum(tags=False), "emt_small")
    with pytest.warns(UserWarning, match=r"tag_slab\(atoms\)"):
        predict(platinum(tags=False), ByHand())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert predict(platinum(), ByHand())[0] == PLATINUM


def test_runs_on_files_of_ones_own_may_say_it_or_inherit_it(place, capsys):
    own = {"paths": {"train": "mine.lmdb"}}
    said = place("said.ckpt", tag_rule="1", **own)
    assert surface_rule(said) == 1
    assert surface_rule(place("a.ckpt", tag_rule="oc20")) == "oc20", "the run comes first"
    noted = {"inherited_tag_rule": {"surface": "half", "from": "flt-small"}}
    assert surface_rule(place("a.ckpt", noted, **own)) == "half"
    assert surface_rule(place("a.ckpt", noted, name="oc20_is2re")) == "oc20", "the data come first"
    assert main(["predict", place("a.ckpt", noted, **own), "POSCAR", "--tag-slab"]) == 0
    out, err = capsys.readouterr()
    assert "below 4, surface 8" in out
    assert err == "flt-mol: tagged by the rule 'half', that of flt-small, which the model was " + (
        "tuned from\n"
    )
    for start, rule in (("flt-small", "half"), (find_checkpoint(said).resolve(), 1), ("/no", None)):
        tuned = place("a.ckpt", {"finetune": {"checkpoint": str(start)}}, **own)
        assert surface_rule(tuned) == rule, "runs of before it was noted"
    with pytest.raises(ValueError, match=r"a.ckpt: data.tag_rule is 'top', expected oc20, half or"):
        surface_rule(place("a.ckpt", tag_rule="top"))
