"""The weights that travel with the code reach what their cards say."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import yaml

from flt_mol.data.splits import open_splits
from flt_mol.evaluation.splits import evaluate_splits
from flt_mol.files import shipped_folder
from flt_mol.models.energy import EnergyConfig
from flt_mol.training.checkpoints import load_model, read_checkpoint

MODELS = sorted(path.parent for path in shipped_folder("models").glob("*/weights.ckpt"))
every_model = pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)


def test_models_with_weights():
    assert [folder.name for folder in MODELS] == ["emt_performer_small", "emt_small", "flt-small"]


@every_model
def test_metrics_are_those_of_the_card(folder):
    trained_on = read_checkpoint(folder / "weights.ckpt")["config"]["data"]
    splits, baselines = open_splits(None, None, trained_on)
    results = evaluate_splits(load_model(folder.name), splits)
    stated = json.loads((folder / "results.json").read_text("utf-8"))["splits"]
    card = (folder / "README.md").read_text("utf-8")
    assert set(results) == set(stated) == {"val_id", "val_ood_ads", "val_ood_cat", "val_ood_both"}
    for split, result in results.items():
        assert result.metrics["mae"] == pytest.approx(stated[split]["mae"], abs=2e-5)
        assert f"{stated[split]['mae']:.4f}" in card
    mae = results["val_id"].metrics["mae"]
    assert mae < baselines["constant"]["val_id"]
    assert mae < baselines["composition"]["val_id"]


@every_model
def test_weights_are_of_the_model_in_the_yaml(folder):
    values = yaml.safe_load((folder / "model.yaml").read_text("utf-8"))
    assert load_model(folder.name).config == EnergyConfig.from_dict(values)


@every_model
def test_weights_are_small_and_name_no_place(folder):
    file = folder / "weights.ckpt"
    assert file.stat().st_size < 1_000_000
    content = torch.load(file, weights_only=True)
    assert "output" not in content["config"]
    assert content["config"]["data"]["paths"] == {}
    assert content["elements_seen"] == [1, 6, 7, 8, 13, 28, 29, 46, 47, 78, 79]


def test_what_they_were_trained_on_is_what_the_script_finds(tmp_path, monkeypatch):
    """Nothing else in the file changes."""
    script = Path(__file__).resolve().parents[2] / "scripts" / "mark_trained_on.py"
    if not script.is_file():
        pytest.skip("needs the checkout")
    contents = [torch.load(folder / "weights.ckpt", weights_only=True) for folder in MODELS]
    marked = contents[0]
    known = marked["systems"]["trained_on"]
    assert len(known) == len(known.unique()) == 3191
    assert all(torch.equal(one["systems"]["trained_on"], known) for one in contents)
    copy = tmp_path / "bare.ckpt"
    torch.save({key: value for key, value in marked.items() if key != "systems"}, copy)
    monkeypatch.setattr(sys, "argv", [str(script), str(copy)])
    runpy.run_path(str(script), run_name="__main__")
    again = torch.load(copy, weights_only=True)
    assert again.keys() == marked.keys()
    for part in ("systems", "state_dict"):
        assert again[part].keys() == marked[part].keys()
    assert torch.equal(again["systems"]["trained_on"], known)
    assert all(torch.equal(again["state_dict"][k], v) for k, v in marked["state_dict"].items())
