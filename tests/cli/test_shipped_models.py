"""The weights that travel with the code reach what their cards say."""

import json

import pytest
import torch
import yaml

from flt_mol.evaluation import evaluate_checkpoint
from flt_mol.files import shipped_folder
from flt_mol.models import EnergyConfig
from flt_mol.models.checkpoint import load_model

MODELS = sorted(path.parent for path in shipped_folder("models").glob("*/weights.ckpt"))
every_model = pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
SPLITS = {"val_id", "val_ood_ads", "val_ood_cat", "val_ood_both"}
OF_FORCES = {"val_id", "val_ood_cat"}  # of emt_relaxations


def test_models_with_weights():
    of_emt, ours = ["forces", "performer-small", "small"], ["", "-refine", "-v2"]
    names = [f"emt-{name}" for name in of_emt] + [f"flt-small{name}" for name in ours]
    assert [folder.name for folder in MODELS] == names


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:energies beyond")  # total ones, of strained slabs
@every_model
def test_metrics_are_those_of_the_card(folder):
    summary, results = evaluate_checkpoint(folder.name)
    stated = json.loads((folder / "results.json").read_text("utf-8"))["splits"]
    card = (folder / "README.md").read_text("utf-8")
    forces = folder.name == "emt-forces"
    assert set(results) == set(stated) == (OF_FORCES if forces else SPLITS)
    for split, result in results.items():
        assert result.metrics["mae"] == pytest.approx(stated[split]["mae"], abs=2e-5)
        assert f"{stated[split]['mae']:.4f}" in card
        if forces:
            assert result.further["forces_mae"] == pytest.approx(0.0, abs=0.05)
            assert f"{result.further['forces_mae']:.4f}" in card
    mae, baselines = results["val_id"].metrics["mae"], summary["baselines"]
    assert mae < min(of["val_id"] for of in baselines.values())
    assert "trained_on" not in summary


@every_model
def test_weights_are_of_the_model_in_the_yaml_and_name_no_place(folder):
    values = yaml.safe_load((folder / "model.yaml").read_text("utf-8"))
    assert load_model(folder.name).config == EnergyConfig.model_validate(values)
    file = folder / "weights.ckpt"
    assert file.stat().st_size < 1_000_000
    content = torch.load(file, weights_only=True)
    assert "output" not in content["config"]
    assert content["config"]["data"]["paths"] == {}
    assert content["elements_seen"] == [1, 6, 7, 8, 13, 28, 29, 46, 47, 78, 79]
    count = 4560 if folder.name == "emt-forces" else 3191  # frames of emt_relaxations
    assert len(set(content["systems"]["trained"])) == count
