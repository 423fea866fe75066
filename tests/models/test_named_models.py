"""Every named model goes through the same contract."""

from pathlib import Path

import pytest
import torch
import yaml

from flt_mol.files import shipped_folder
from flt_mol.models import EnergyConfig, EnergyModel, named_config
from flt_mol.models.checkpoint import find_checkpoint, load_model
from flt_mol.nn import FLTBlock
from helpers import invariances as testing

NAMES = sorted(file.parent.name for file in shipped_folder("models").glob("*/model.yaml"))
NARROW = {"embed_dim": 48, "num_heads": 12, "num_layers": 2, "ffn_dim": 32, "far_blocks": None}
PERIODIC = testing.random_structures(
    torch.Generator().manual_seed(1), (7, 1, 12), (True, True, False)
)


def narrow(name):
    """The model with all its parts, at a width for tests."""
    config = named_config(name).model_copy(update=NARROW)
    if config.spectral is not None:
        config.spectral.num_heads = 4
    torch.manual_seed(0)
    model = EnergyModel(config).eval()
    model.normalizer.fit(torch.tensor([-3.0, 1.0]))
    return model


def test_there_are_models():
    assert {"flt-small", "flt-base", "flt-large", "emt-small", "paper-flt-12l"} <= set(NAMES)


every_name = pytest.mark.parametrize("name", NAMES)


@every_name
def test_its_file_holds_every_setting_and_its_card_exists(name):
    folder = shipped_folder("models") / name
    content = yaml.safe_load((folder / "model.yaml").read_text(encoding="utf-8"))
    assert set(content) == set(EnergyConfig.model_fields)
    for part in ("spectral", "pairs", "images"):
        if content[part] is not None:
            assert set(content[part]) == set(type(getattr(named_config(name), part)).model_fields)
    assert (folder / "README.md").is_file()


@every_name
def test_order_place_and_company_do_not_matter(name):
    model = narrow(name)
    testing.check_batch_equals_alone(model, PERIODIC, tolerance=1e-4)
    testing.check_permutation(model, PERIODIC, tolerance=1e-4)
    testing.check_translation(model, PERIODIC, tolerance=1e-3)


@every_name
def test_what_it_claims(name):
    model = narrow(name)
    claims = {
        testing.check_rotation: model.rotation_invariant,
        testing.check_periodic_images: model.sees_images,
        testing.check_supercell: model.supercell_consistent,
    }
    for check, holds in claims.items():
        if holds:
            check(model, PERIODIC, tolerance=1e-3)
    assert model.rotation_invariant == (model.config.rpe is None)


@every_name
def test_a_step_of_training_reaches_every_weight(name):
    model = narrow(name).train()
    out = model(PERIODIC)
    loss = sum(value.square().sum() for value in out.values())
    loss.backward()
    idle = [key for key, p in model.named_parameters() if p.grad is None]
    assert not idle
    assert torch.isfinite(loss)
    if model.config.recycles > 1:
        assert out["energy_recycles"].shape == (model.config.recycles, 3)


@pytest.mark.parametrize(
    "name", [n for n in NAMES if (shipped_folder("models") / n / "weights.ckpt").is_file()]
)
def test_shipped_weights(name):
    model = load_model(name)
    assert model.config == named_config(name).model_copy(update={"seed": model.config.seed})
    assert model.elements_seen.sum() == 11
    systems = 4560 if name == "emt-forces" else 3191  # frames of emt_relaxations
    assert model.trained_on["systems"] == systems
    content = torch.load(find_checkpoint(name), weights_only=True)
    assert len(content["systems"]["trained"]) == systems
    assert Path(find_checkpoint(name)).name == "weights.ckpt"


def test_dropout_of_attention_is_apart_from_that_of_feed_forward_networks():
    def block(**changes):
        model = EnergyModel(named_config("paper-flt-12l").model_copy(update=NARROW | changes))
        return next(part for part in model.modules() if isinstance(part, FLTBlock))

    both = block(attention_dropout=0.5, dropout=0.25)
    found = [module.p for module in both.modules() if isinstance(module, torch.nn.Dropout)]
    assert (both.attention.dropout.p, sorted(found)) == (0.5, [0.25, 0.5])
    assert block().attention.dropout.p == 0.1
    assert block(attention_dropout=None, dropout=0.25).attention.dropout.p == 0.25
