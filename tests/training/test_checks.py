"""Settings that cannot work, each refused with its mend."""

from dataclasses import replace

import pytest

from flt_mol.models.config import EnergyConfig, ImageConfig, PairConfig
from flt_mol.training.checks import check_run
from flt_mol.training.config import DataConfig, RunConfig, TrainingConfig
from flt_mol.training.losses import LossConfig


def run(outputs=("energy",), recycles=1, data=None, loss=None, **training):
    return RunConfig(
        data=data or DataConfig(),
        model=EnergyConfig(
            outputs=list(outputs), recycles=recycles, pairs=PairConfig(cutoff=4.0), rpe=None
        ),
        training=TrainingConfig(**training),
        loss=LossConfig(**(loss or {})),
    )


ALL = ("energy", "energy_initial", "displacement")


@pytest.mark.parametrize(
    "config",
    [
        run(),
        run(ALL),
        run(ALL, interpolation=0.5),
        run(ALL[::2], noise=0.1, interpolation=1.0),
        run(recycles=3, loss={"pass_weights": [0.0, 0, 1]}),
        run(
            ALL,
            loss={
                "displacement_weight": 0.0,
                "displacement_decay": "linear",
                "displacement_final_weight": 1.0,
            },
        ),
        run(loss={"energy_initial_weight": 0.0, "displacement_weight": 0.0}),
        run(optimizer="adam", warmup_steps=0),
    ],
)
def test_what_works(config):
    check_run(config)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"optimizer": "sgd"}, "training.optimizer is 'sgd', expected one of adamw, adam"),
        ({"warmup_steps": -1}, r"training.warmup_steps is -1, expected null \(warmup_fraction"),
        ({"warmup_steps": 0.5}, "training.warmup_steps is 0.5, expected a whole number or null"),
        ({"noise": -0.1}, "training.noise is -0.1, expected at least 0"),
        ({"noise": None}, "training.noise is None, expected a number"),
        ({"interpolation": 1.1}, "training.interpolation is 1.1, expected from 0 to 1"),
    ],
)
def test_training(training, message):
    with pytest.raises(ValueError, match=message):
        check_run(run(**training))


def test_seeds_are_added():
    config = run(seed=2**62)
    config.model.seed = 2**62 - 1
    check_run(config)
    config.model.seed += 1
    message = f"model.seed and training.seed add up to {2**63}, expected a whole number of 64"
    with pytest.raises(ValueError, match=message):
        check_run(config)


@pytest.mark.parametrize("part", ["pairs", "images"])
def test_cutoffs_have_an_upper_bound(part):
    config = run()
    kind = {"pairs": PairConfig, "images": ImageConfig}[part]
    setattr(config.model, part, kind(cutoff=100.1))
    with pytest.raises(ValueError, match=rf"model.{part}.cutoff is 100.1, expected at most 100 Å"):
        check_run(config)
    config.model.pairs, config.model.images = PairConfig(cutoff=100.0), None
    check_run(config)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"displacement_weight": -1.0}, "loss.displacement_weight is -1.0, expected null, or at"),
        ({"energy_initial_weight": "1"}, "loss.energy_initial_weight is '1', expected a number"),
        ({"energy_initial_weight": float("nan")}, "loss.energy_initial_weight is nan"),
        ({"displacement_decay": "step"}, "expected one of none, linear, cosine"),
        ({"displacement_final_weight": 1.0}, "displacement_decay is 'none': choose linear or co"),
        ({"displacement_weight": 0.0}, "displacement_weight is 0: nothing would train it; take it"),
        ({"energy_initial_weight": 0.0}, "has energy_initial, and loss.energy_initial_weight is 0"),
        (
            {"displacement_weight": 0.0, "displacement_decay": "linear"},
            "loss.displacement_weight is 0: nothing",
        ),
        ({"pass_weights": [1.0]}, "has 1 weights, and the model makes 2 passes"),
        ({"pass_weights": [1.0, 0.0]}, "ends with 0.0, expected a last weight above 0"),
        ({"pass_weights": [-1.0, 1.0]}, r"is \[-1.0, 1.0\], expected null, or numbers"),
        ({"pass_weights": []}, r"loss.pass_weights is \[\], expected null, or numbers"),
        ({"pass_weights": [float("inf"), 1.0]}, r"is \[inf, 1.0\], expected null, or numbers"),
        ({"pass_weights": 1.0}, "loss.pass_weights is 1.0, expected null, or numbers"),
    ],
)
def test_losses(loss, message):
    with pytest.raises(ValueError, match=message):
        check_run(run(ALL, recycles=2, loss=loss))


@pytest.mark.parametrize("name", ["energy_initial", "displacement"])
def test_a_weight_without_its_output(name):
    outputs = [output for output in ALL if output != name]
    message = f"loss.{name}_weight is 2, and the model has no output {name}: add it to model.out"
    with pytest.raises(ValueError, match=message):
        check_run(run(outputs, loss={f"{name}_weight": 2.0}))


@pytest.mark.parametrize(("key", "value"), [("noise", 0.1), ("interpolation", 1.0)])
def test_initial_energies_are_of_atoms_that_stay(key, value):
    config = run(ALL, **{key: value})
    with pytest.raises(ValueError, match=f"training.{key} is {value}, which moves the atoms of ev"):
        check_run(config)
    config.model.outputs = ["energy", "displacement"]
    check_run(config)
    same = replace(config, data=DataConfig(energy="y_init"))
    with pytest.raises(ValueError, match="y_init, is the energy of the initial structure"):
        check_run(same)


def test_a_learned_map_that_exact_attention_never_uses():
    config = run()
    config.model.attention, config.model.feature_map = "exact", "softplus"
    with pytest.raises(ValueError, match="'softplus' and model.attention 'exact', which takes no"):
        check_run(config)
    config.model.attention = "linear"
    check_run(config)
    config.model.attention, config.model.feature_map = "exact", "elu"
    check_run(config)
