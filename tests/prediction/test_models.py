"""What predictions of real models must not depend on, and inputs at the edge of sense."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from ase import Atoms
from slabs import platinum

from flt_mol import FLTCalculator, predict
from flt_mol.files import shipped_folder
from flt_mol.models.energy import EnergyConfig, EnergyModel

NAMES = sorted(folder.parent.name for folder in shipped_folder("models").glob("*/model.yaml"))
NARROW = {"embed_dim": 32, "num_heads": 4, "num_layers": 2, "ffn_dim": 32, "num_features": 16}
TRAINED = ("emt_small", "emt_performer_small")


def model_of(name):
    """The named model: trained, or with random weights, and narrow but for flt-small."""
    if name in TRAINED:
        return name
    text = (shipped_folder("models") / name / "model.yaml").read_text("utf-8")
    config = EnergyConfig.from_dict(yaml.safe_load(text))
    if name != "flt-small":
        layers = min(config.num_layers, 2)
        config = replace(config, **{**NARROW, "num_layers": layers})
        if config.far_blocks is not None:
            config = replace(config, far_blocks=min(config.far_blocks, layers))
        if config.spectral is not None:
            config.spectral.num_heads = 4
        if config.pairs is not None and config.pairs.vector_blocks is not None:
            config.pairs.vector_blocks = min(config.pairs.vector_blocks, layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = EnergyModel(config)
    model.mark_seen(range(1, 119))
    return model


def odd_structures():
    """Slabs of several sizes; single atoms with and without cell; atoms 80 Å apart; far away."""
    slab, moved = platinum(), platinum()
    moved.positions += 3000.0
    atom = Atoms("Pt", positions=[[1, 2, 3]], tags=[2])
    boxed = Atoms("O", positions=[[1, 2, 3]], tags=[2], cell=[9, 9, 9], pbc=True)
    apart = Atoms("Pt2O", positions=[[0, 0, 0], [80, 0, 0], [0, 0, -80]], tags=[1, 1, 2])
    return [slab, atom, slab * (2, 1, 1), boxed, apart, moved]


@pytest.mark.filterwarnings("ignore:no cell in")
@pytest.mark.parametrize("name", NAMES)
def test_batched_equals_one_by_one_and_the_calculator(name):
    model, structures = model_of(name), odd_structures()
    before = [atoms.copy() for atoms in structures]
    alone = np.concatenate([predict(atoms, model) for atoms in structures])
    assert np.isfinite(alone).all()
    for size in (2, 4, 100):
        np.testing.assert_allclose(predict(structures, model, size), alone, atol=2e-5)
    backwards = predict(structures[::-1], model, 4)[::-1]
    np.testing.assert_allclose(backwards, alone, atol=2e-5)
    np.testing.assert_array_equal(predict(structures, model), predict(structures, model))
    calculator = FLTCalculator(model)
    one_by_one = [calculator.get_potential_energy(atoms) for atoms in structures]
    np.testing.assert_array_equal(one_by_one, alone)
    np.testing.assert_allclose(alone[5], alone[0], atol=1e-4)  # moved by 3000 Å
    assert all(a == b and a.info == b.info for a, b in zip(structures, before, strict=True))


def test_an_ensemble_of_both_released_models():
    structures = [platinum(), platinum() * (2, 1, 1)]
    found = predict(structures, list(TRAINED))
    for row, name in zip(found.members, TRAINED, strict=True):
        np.testing.assert_array_equal(row, predict(structures, name))


def test_systems_far_larger_than_those_trained_on_are_warned_of_once():
    model = model_of("flt-small")
    model.trained_on = {"most_atoms": 13}
    slab = platinum()
    with pytest.warns(UserWarning, match="more than 2 times as many atoms.*13, in 2 of 3") as seen:
        predict([slab, slab * (3, 1, 1), slab * (2, 2, 1)], model, 1)
    assert len(seen) == 1
    model.trained_on = {}
    predict([slab * (3, 1, 1)], model)
    other = model_of("flt-small")
    other.trained_on = {"most_atoms": 1000}
    model.trained_on = {"most_atoms": 21}  # the smaller one counts
    with pytest.warns(UserWarning, match="which had 21"):
        predict(slab * (2, 2, 1), [model, other])
    predict(slab * (3, 1, 1), model)
