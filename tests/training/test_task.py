"""What a step does: schedule, augmentation, clipping, and what stops it."""

import math
from dataclasses import replace

import pytest
import torch

from flt_mol import Structures
from flt_mol.data import open_dataset
from flt_mol.data.loader import Window
from flt_mol.models.config import EnergyConfig
from flt_mol.models.energy import EnergyModel
from flt_mol.structures import relaxed_displacement
from flt_mol.training.config import LossConfig, TrainingConfig
from flt_mol.training.task import EnergyTask, learning_rate_factor
from helpers.training import ALL_OUTPUTS, SMALL, relaxations


def task(model=None, loss=None, settings=SMALL, **training):
    model = EnergyModel(EnergyConfig.model_validate(settings)) if model is None else model
    return EnergyTask(model, TrainingConfig(**training), 10, loss, ("mine", "val"))


def systems(tmp_path, count=4):
    dataset = open_dataset(relaxations(tmp_path / "a.extxyz", count))
    return dataset.batch(range(count))


def in_one_step(batch):
    return batch, Window.of([batch])


@pytest.mark.parametrize(
    ("decay", "at_55"),
    [("linear", 0.5), ("cosine", 0.5), ("inverse-sqrt", math.sqrt(10 / 56))],
)
def test_schedule(decay, at_55):
    factor = learning_rate_factor(100, TrainingConfig(warmup_fraction=0.1, decay=decay))
    assert [factor(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert factor(55) == pytest.approx(at_55)
    last = math.sqrt(10 / 101) if decay == "inverse-sqrt" else 0.0
    assert factor(100) == pytest.approx(last, abs=1e-12)
    config = TrainingConfig(warmup_fraction=0.9, warmup_steps=10, decay=decay)
    assert learning_rate_factor(100, config)(55) == factor(55)


def test_warmup_of_nothing_starts_at_the_peak():
    assert learning_rate_factor(10, TrainingConfig(warmup_steps=0))(0) == 1.0


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_optimisers(name):
    made = task(optimizer=name, beta1=0.7, weight_decay=0.3).configure_optimizers()["optimizer"]
    assert type(made).__name__.lower() == name
    assert made.param_groups[0]["betas"] == (0.7, 0.98)
    assert made.param_groups[0]["weight_decay"] == 0.3


def test_frozen_parameters_are_not_optimised():
    model = EnergyModel(EnergyConfig.model_validate(SMALL))
    model.head.requires_grad_(False)
    groups = task(model).configure_optimizers()["optimizer"].param_groups
    optimised = {id(parameter) for parameter in groups[0]["params"]}
    for parameter in model.parameters():
        assert (id(parameter) in optimised) == parameter.requires_grad


class Oracle(torch.nn.Module):
    """Knows the answer in any frame; `error` is added to every target."""

    def __init__(self, error=0.0):
        super().__init__()
        from flt_mol.models.energy import Normalizer

        self.normalizers = {"energy": Normalizer(), "energy_initial": Normalizer()}
        self.error = torch.nn.Parameter(torch.tensor(error))
        self.shown = []

    def forward(self, structures):
        self.shown.append(structures)
        return {
            "energy": structures.energy.float() + self.error,
            "displacement": relaxed_displacement(structures) + 0 * self.error,
        }


@pytest.mark.parametrize(
    "settings",
    [
        {"rotation": "full", "shift_images": True},
        {"rotation": "z", "noise": 0.1},
        {"interpolation": 1.0, "rotation": "full"},
    ],
)
def test_targets_follow_the_augmentation(tmp_path, settings):
    torch.manual_seed(0)
    batch, model = systems(tmp_path), Oracle()
    step = task(model, LossConfig(displacement_weight=1.0), **settings)
    step._trainer = None
    loss = step.training_step(in_one_step(batch), 0)
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-5)
    shown = model.shown[0]
    assert not torch.allclose(shown.positions, batch.positions, atol=0.01)
    # What is left to predict is a displacement within the frame that the model saw.
    left = shown.positions + relaxed_displacement(shown)
    assert torch.allclose(left, shown.positions_relaxed, atol=1e-4) or settings.get("shift_images")
    fixed = shown.fixed
    if "noise" in settings:
        matrix = torch.linalg.solve(batch.cell, shown.cell)[batch.system]
        expected = torch.einsum("ni,nij->nj", batch.positions, matrix)
        moved = (shown.positions - expected).norm(dim=-1)
        assert moved[fixed].max() < 1e-4
        assert moved[~fixed].min() > 1e-3


def test_initial_energies_of_moved_atoms_do_not_count(tmp_path):
    torch.manual_seed(0)
    batch = systems(tmp_path)
    step = task(settings=ALL_OUTPUTS, noise=0.05)
    step.training_step(in_one_step(batch), 0)
    assert step._sums["train/energy_initial_mae"][1] == 0
    assert step._sums["train/mae"][1] == 4
    still = task(settings=ALL_OUTPUTS)
    still.training_step(in_one_step(batch), 0)
    assert still._sums["train/energy_initial_mae"][1] == 4


def test_every_weight_is_trained(tmp_path):
    torch.manual_seed(0)
    step = task(settings=ALL_OUTPUTS)
    step.training_step(in_one_step(systems(tmp_path)), 0).backward()
    idle = [n for n, p in step.model.named_parameters() if p.grad is None or not p.grad.any()]
    # A table has rows for every element; zero-initialised layers hide what is before them.
    assert not [name for name in idle if step.model.get_parameter(name).grad is None], idle


def test_training_on_forces(tmp_path):
    """Shares of accumulated batches are by known forces; errors become smaller, of both kinds."""
    torch.manual_seed(0)
    batch = systems(tmp_path)
    forces = torch.randn(batch.positions.shape)
    forces[-1] = torch.nan
    batch = replace(batch, forces=forces)
    assert Window.of([batch[0], batch[3]]) == (2, 6, 5)
    step = task(settings={**ALL_OUTPUTS, "feedback": "features", "outputs": ["energy", "forces"]})
    optimizer = step.configure_optimizers()["optimizer"]
    losses = []
    for _ in range(40):
        losses.append(step.training_step(in_one_step(batch), 0))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.95 * losses[0]
    assert step._sums["train/forces"][1] == 40 * 11
    assert not [n for n, p in step.model.named_parameters() if p.grad is None]
    with torch.inference_mode():
        step.validation_step(batch, 0)
    assert step._sums["val/forces_mae"][1] == 33
    assert step._sums["val/forces_cosine"][1] == 11
    assert step._sums["val/efwt"][1] == 4


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_names_split_and_systems(tmp_path, error):
    with pytest.raises(ValueError, match=r"'mine'.*slab-0.*slab-3"):
        task(Oracle(error)).training_step(in_one_step(systems(tmp_path)), 0)
    with pytest.raises(ValueError, match=r"'val'.*slab-0"):
        task(Oracle(error)).validation_step(systems(tmp_path), 0)


def test_batches_without_targets_are_named_with_their_split():
    one = Structures.single([1], [[0, 0, 0]], sid="odd")
    with pytest.raises(ValueError, match=r"split 'mine'.*odd"):
        task().training_step(in_one_step(one), 0)
    with pytest.raises(ValueError, match=r"split 'val'.*odd"):
        task().validation_step(one, 0)
