"""Training on tiny and troublesome sets of one's own."""

import csv
import importlib.util
import io
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from ase.build import add_adsorbate, fcc111
from ase.constraints import FixAtoms
from ase.io import write
from rich.console import Console

from flt_mol import Structures
from flt_mol.data import open_dataset
from flt_mol.evaluation.splits import evaluate_model
from flt_mol.models.energy import EnergyConfig, EnergyModel, PairConfig, SpectralConfig
from flt_mol.data.schema import far_off
from flt_mol.training.checkpoints import load_model
from flt_mol.training.config import DataConfig, RunConfig, TrainingConfig, load_run_config
from flt_mol.training.losses import LossConfig, training_loss
from flt_mol.training.run import build_model, train
from flt_mol.training.run_data import load_split, split_path, with_pairs_in_memory
from flt_mol.training.task import EnergyTask, learning_rate_factor


def slabs(path, energies):
    frames = []
    for i, energy in enumerate(energies):
        slab = fcc111(("Cu", "Ag", "Au")[i % 3], (1, 1, 3), vacuum=6.0)
        add_adsorbate(slab, "O", 1.2 + 0.1 * i, "fcc")
        slab.set_tags([0, 0, 1, 2])
        slab.info = {}
        if energy is not None:
            slab.info["y_relaxed"] = energy
        frames.append(slab)
    write(path, frames)
    return str(path)


def config(tmp_path, train_energies, validation_energies=(-1.0, 1.0), **training):
    return RunConfig(
        data=DataConfig(
            paths={
                "train": slabs(tmp_path / "train.extxyz", train_energies),
                "val_id": slabs(tmp_path / "val.extxyz", validation_energies),
            }
        ),
        model=EnergyConfig(embed_dim=8, num_heads=2, num_layers=1, ffn_dim=8, num_features=8),
        training=TrainingConfig(**{"epochs": 2, "batch_size": 32, **training}),
        output=str(tmp_path / "run"),
    )


def quiet():
    return Console(quiet=True)


def relaxations(path, count, **lacking):
    """Slabs with an adatom that moves by 0.3 Å, and energies before and after; lowest layer fixed.

    lacking: number of a system → a target it does not have.
    """
    frames = []
    for i in range(count):
        slab = fcc111(("Cu", "Ag", "Au")[i % 3], (2, 1, 2), vacuum=6.0)
        add_adsorbate(slab, "O", 1.2 + 0.1 * i, "fcc")
        slab.set_tags([0, 0, 1, 1, 2])
        slab.set_constraint(FixAtoms([0, 1]))
        relaxed = slab.positions.copy()
        relaxed[4] += (0.0, 0.0, 0.3)
        slab.set_array("pos_relaxed", relaxed)
        slab.info = {"y_relaxed": float(i), "y_init": 10.0 + 2.0 * i, "sid": f"slab-{i}"}
        if f"of_{i}" in lacking:
            name = lacking[f"of_{i}"]
            del (slab.arrays if name == "pos_relaxed" else slab.info)[name]
        frames.append(slab)
    write(path, frames)
    return str(path)


def fuller(tmp_path, model=None, loss=None, lacking=None, **training):
    """A run with three outputs and three passes that move the atoms."""
    return RunConfig(
        data=DataConfig(
            paths={
                "train": relaxations(tmp_path / "train.extxyz", 5, **(lacking or {})),
                "val_id": relaxations(tmp_path / "val.extxyz", 2),
            }
        ),
        model=EnergyConfig(
            **{
                "embed_dim": 8,
                "num_heads": 2,
                "num_layers": 1,
                "ffn_dim": 8,
                "num_features": 8,
                "rpe": None,
                "pairs": PairConfig(cutoff=3.5, num_basis=8),
                "outputs": ["energy", "energy_initial", "displacement"],
                "recycles": 3,
                "feedback": "positions",
                **(model or {}),
            }
        ),
        training=TrainingConfig(**{"epochs": 2, "batch_size": 3, "max_steps": 2, **training}),
        loss=loss or LossConfig(),
        output=str(tmp_path / "run"),
    )


def test_fewer_records_than_a_batch(tmp_path):
    result = train(config(tmp_path, [-1.0, 0.0, 2.0]), console=quiet())
    assert result.best["train/mae"] > 0
    weights = torch.load(result.checkpoint, weights_only=True)["state_dict"]
    assert weights["normalizer.mean"].item() == pytest.approx(1 / 3)
    assert result.checkpoint in result.files


@pytest.mark.filterwarnings("ignore:elements never trained on")
@pytest.mark.parametrize("energies", [[1.5], [1.5, 1.5, 1.5]], ids=["one", "equal"])
def test_targets_without_spread(tmp_path, energies):
    with pytest.warns(UserWarning, match="std is set to 1"):
        result = train(config(tmp_path, energies), console=quiet())
    assert math.isfinite(result.best["train/mae"])


def test_a_split_without_targets_is_refused(tmp_path):
    settings = config(tmp_path, [None, None])
    with pytest.raises(ValueError, match=r"train\.extxyz.*no targets"):
        train(settings, console=quiet())
    assert not (tmp_path / "run").exists()


def test_more_epochs_lower_the_training_error(tmp_path):
    energies = [-1.0, 0.5, 2.0, -1.2, 0.4, 2.2]
    result = train(config(tmp_path, energies, epochs=60, learning_rate=1e-2), console=quiet())
    rows = (result.folder / "logs/csv/metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("train/mae")
    errors = [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]]
    assert errors[-1] < 0.3 * errors[0]


def test_same_seed_same_weights(tmp_path):
    weights = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        result = train(config(tmp_path / name, [-1.0, 0.0, 2.0]), console=quiet())
        weights.append(torch.load(result.checkpoint, weights_only=True)["state_dict"])
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_max_steps(tmp_path):
    settings = config(tmp_path, [-1.0, 0.0, 2.0], epochs=50, batch_size=1, max_steps=4)
    result = train(settings, console=quiet())
    assert result.best["epoch"] <= 2


def test_batches_by_a_budget_of_atoms(tmp_path, monkeypatch):
    seen = []
    original = EnergyTask.training_step

    def step(self, batch, batch_idx):
        seen.append(len(batch))
        return original(self, batch, batch_idx)

    monkeypatch.setattr(EnergyTask, "training_step", step)
    train(config(tmp_path, [-1.0, 0.0, 2.0, 1.0, 3.0], batch_atoms=11), console=quiet())
    assert sorted(seen) == [1, 1, 2, 2, 2, 2], "systems of four atoms"


def test_a_budget_of_atoms_that_is_too_small(tmp_path):
    with pytest.raises(ValueError, match=r"batch_atoms is 3; training data: .*4 atoms, more than"):
        train(config(tmp_path, [-1.0, 0.0], batch_atoms=3), console=quiet())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("max_steps", "epochs"), [(2, 1), (4, 2), (6, 2)])
def test_a_stop_within_an_epoch_is_validated(tmp_path, max_steps, epochs):
    settings = config(
        tmp_path, [-1.0, 0.0, 2.0], epochs=50, batch_size=1, max_steps=max_steps, learning_rate=0.05
    )
    result = train(settings, console=quiet())
    with open(result.folder / "logs/csv/metrics.csv", newline="") as file:
        maes = [float(row["val/mae"]) for row in csv.DictReader(file) if row["val/mae"]]
    assert len(set(maes)) == epochs, "an epoch repeats the one before"
    assert result.best["val/mae"] == pytest.approx(min(maes), rel=1e-6)
    last = load_model(result.folder / "last.ckpt")
    again = evaluate_model(last, open_dataset(settings.data.paths["val_id"]))
    assert again.metrics["mae"] == pytest.approx(maes[-1], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_steps": -1}, "training.max_steps is -1"),
        ({"epochs": "3"}, "training.epochs is '3', expected a whole number"),
        ({"accelerator": "tpu"}, "training.accelerator is 'tpu'"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_made(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        train(config(tmp_path, [-1.0, 0.0, 2.0], **change), console=quiet())
    assert not (tmp_path / "run").exists()


def test_an_accelerator_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"accelerator is 'gpu'.*there are: auto, cpu"):
        train(config(tmp_path, [-1.0, 0.0, 2.0], accelerator="gpu"), console=quiet())
    assert not (tmp_path / "run").exists()


def break_at(monkeypatch, epoch, error):
    original = EnergyTask.training_step

    def step(self, batch, batch_idx):
        if self.current_epoch == epoch:
            raise error
        return original(self, batch, batch_idx)

    monkeypatch.setattr(EnergyTask, "training_step", step)


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt()])
def test_a_failed_run_does_not_block_its_retry(tmp_path, monkeypatch, error):
    settings = config(tmp_path, [-1.0, 0.0, 2.0])
    with monkeypatch.context() as patch:
        break_at(patch, 0, error)
        with pytest.raises(type(error)):
            train(settings, console=quiet())
    assert not (tmp_path / "run").exists()
    train(settings, console=quiet())


def test_a_folder_of_mine_keeps_what_was_in_it(tmp_path, monkeypatch):
    settings = config(tmp_path, [-1.0, 0.0, 2.0])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    break_at(monkeypatch, 0, ValueError("odd"))
    with pytest.raises(ValueError, match="odd"):
        train(settings, console=quiet())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_an_interrupt_keeps_the_best_weights_and_names_them(tmp_path, monkeypatch):
    break_at(monkeypatch, 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as caught:
        train(config(tmp_path, [-1.0, 0.0, 2.0]), console=quiet())
    assert str(tmp_path / "run" / "best.ckpt") in caught.value.__notes__[0]
    load_model(tmp_path / "run")


def test_a_runs_own_configuration_can_be_trained_again(tmp_path):
    first = train(config(tmp_path, [-1.0, 0.0, 2.0]), console=quiet())
    again = load_run_config(str(first.folder / "config.yaml"), [f"output={tmp_path / 'again'}"])
    second = train(again, console=quiet())
    weights = [
        torch.load(run.checkpoint, weights_only=True)["state_dict"] for run in (first, second)
    ]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.filterwarnings("ignore:elements never trained on")
def test_bad_records_are_left_out_on_request(tmp_path):
    settings = config(tmp_path, [-1.0, math.nan, 2.0])
    with pytest.raises(ValueError, match="train.extxyz"):
        train(settings, console=quiet())
    settings.data.skip_bad = True
    with pytest.warns(UserWarning, match=r"(?s)train.extxyz: left out 1 of 3 records.*#1"):
        result = train(settings, console=quiet())
    weights = torch.load(result.checkpoint, weights_only=True)["state_dict"]
    assert weights["normalizer.mean"].item() == pytest.approx(0.5)


def test_progress_without_a_terminal_is_plain_lines(tmp_path, capsys):
    train(config(tmp_path, [-1.0, 0.0, 2.0]), console=Console(force_terminal=False, width=120))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert len(lines) == 2
    assert "\x1b" not in "".join(lines)
    assert re.search(r"MAE train \d\.\d{3}  val_id \d\.\d{3} eV$", lines[0])


def test_a_loss_that_is_not_finite_names_the_systems():
    system = Structures.single([1], [[0.0, 0.0, 0.0]], sid="bad-one", energy=1.0)
    model = build_model(RunConfig(), [system, Structures.single([1], [[0, 0, 0]], energy=0.0)])
    with torch.no_grad():
        model.head.tag_weight.fill_(math.nan)
    task = EnergyTask(model, TrainingConfig(), 10)
    with pytest.raises(ValueError, match="bad-one"):
        task.training_step(system, 0)


def test_elements_of_training_are_noted():
    systems = [
        Structures.single([1, 29], [[0.0, 0, 0], [2, 0, 0]], energy=float(z)) for z in range(2)
    ]
    assert build_model(RunConfig(), systems).elements_seen.nonzero().flatten().tolist() == [1, 29]


def test_schedule():
    linear = learning_rate_factor(1000, 0.1, "linear")
    cosine = learning_rate_factor(1000, 0.1, "cosine")
    assert linear(0) == pytest.approx(0.01)
    assert linear(99) == 1.0
    assert (linear(550), cosine(550)) == (pytest.approx(0.5), pytest.approx(0.5))
    assert cosine(325) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert linear(1000) == cosine(1000) == 0.0
    slow = learning_rate_factor(1000, 0.1, "inverse-sqrt")
    assert slow(49) == pytest.approx(0.5)
    assert [slow(k) for k in (99, 399, 899)] == pytest.approx([1.0, 1 / 2, 1 / 3])
    with pytest.raises(ValueError, match="'exponential'; known: linear, cosine"):
        learning_rate_factor(10, 0.1, "exponential")


def test_a_split_without_a_file_says_what_to_set():
    with pytest.raises(ValueError, match=r"data\.paths\.train"):
        split_path(DataConfig(), "train")


def test_all_outputs_on_all_passes(tmp_path):
    loss = LossConfig(displacement_weight=2.0, displacement_decay="cosine")
    result = train(fuller(tmp_path, loss=loss, rotation="full"), console=quiet())
    best = result.best
    assert set(best) == {
        "epoch",
        "train/loss",
        "train/mae",
        "train/energy_initial_mae",
        "train/displacement",
        "train/gradient_norm",
        "val/mae",
        "val/ewt",
        "val/energy_initial_mae",
        "val/displacement",
        "val/displacement_unmoved",
        *(
            f"val/{name}_pass{k}"
            for name in ("mae", "energy_initial_mae", "displacement")
            for k in (1, 2, 3)
        ),
    }
    assert all(math.isfinite(value) for value in best.values())
    # Of three free atoms one moves by 0.3 Å.
    assert best["val/displacement_unmoved"] == pytest.approx(0.1, abs=1e-6)
    assert best["val/mae_pass3"] == best["val/mae"]
    model = load_model(result.checkpoint)
    assert model.normalizer.mean.item() == 2.0
    assert model.normalizer_initial.mean.item() == 14.0
    assert model.normalizer_initial.std.item() == pytest.approx(2 * model.normalizer.std.item())
    again = load_run_config(str(result.folder / "config.yaml"))
    assert again.loss == loss
    assert again.model.outputs == ["energy", "energy_initial", "displacement"]


@pytest.mark.parametrize(("passes", "feedback"), [(1, "features"), (2, "positions")])
def test_every_weight_of_a_model_is_trained(tmp_path, passes, feedback):
    settings = fuller(tmp_path, model={"recycles": passes, "feedback": feedback})
    systems = list(open_dataset(settings.data.paths["train"]))
    torch.manual_seed(0)
    task = EnergyTask(build_model(settings, systems), settings.training, 10)
    task.training_step(Structures.cat(systems), 0).backward()
    idle = [name for name, p in task.model.named_parameters() if p.grad is None]
    assert not idle, "processes that train together would wait for these"


def test_displacements_are_learned(tmp_path):
    settings = fuller(tmp_path, model={"recycles": 1, "feedback": "features"})
    systems = list(open_dataset(settings.data.paths["train"]))
    torch.manual_seed(0)
    task = EnergyTask(build_model(settings, systems), settings.training, 10)
    batch, optimizer = Structures.cat(systems), torch.optim.Adam(task.parameters(), 2e-2)
    for _ in range(40):
        optimizer.zero_grad()
        parts = training_loss(task.model(batch), batch, 0.0, LossConfig(), task.model.normalizers)
        parts.total.backward()
        optimizer.step()
    assert parts.parts["displacement"].value < 0.05, "that of atoms that stay is 0.1"


def test_moved_atoms(tmp_path, monkeypatch):
    shown, searched = [], []
    original, search = EnergyModel.forward, Structures.with_pairs

    def with_pairs(self, cutoff):
        searched.append(self.sid)
        return search(self, cutoff)

    monkeypatch.setattr(Structures, "with_pairs", with_pairs)

    def forward(self, structures, **options):
        if self.training:
            shown.append(structures)
        return original(self, structures, **options)

    monkeypatch.setattr(EnergyModel, "forward", forward)
    outputs = {"outputs": ["energy", "displacement"]}
    train(fuller(tmp_path, model=outputs, noise=0.05, interpolation=0.5), console=quiet())
    stored = {s.sid[0]: s for s in open_dataset(tmp_path / "train.extxyz")}
    for batch in shown:
        assert batch.pairs is None
        for system in batch:
            steps = (system.positions - stored[system.sid[0]].positions).norm(dim=-1)
            assert (steps > 0).tolist() == [False, False, True, True, True]
    assert sum(map(len, shown)) == 5
    assert len(searched) == 2, "validation systems stay where they are"


def test_initial_energies_of_moved_atoms_are_not_learned(tmp_path):
    settings = fuller(tmp_path, interpolation=1.0)
    systems = list(open_dataset(settings.data.paths["train"]))
    task = EnergyTask(build_model(settings, systems), settings.training, 10)
    logged = set()
    task.training_step(Structures.cat(systems), 0)
    task._validation.update(task.model(systems[0]), systems[0])
    task.log = lambda name, value, **kwargs: logged.add(name)
    task.on_validation_epoch_end()
    trained = {name for name in logged if name.startswith("train/")}
    assert trained == {"train/mae", "train/displacement", "train/loss"}


def test_the_loss_is_told_how_far_training_is(tmp_path, monkeypatch):
    seen = []

    def loss(outputs, structures, progress, *rest):
        seen.append(progress)
        return training_loss(outputs, structures, progress, *rest)

    monkeypatch.setattr("flt_mol.training.task.training_loss", loss)
    train(fuller(tmp_path, batch_size=2, epochs=2, max_steps=4), console=quiet())
    assert seen == [0.0, 0.25, 0.5, 0.75]


def test_pairs_are_searched_once(tmp_path, monkeypatch):
    searched, given = [], []
    search, original = Structures.with_pairs, EnergyModel.forward

    def with_pairs(self, cutoff):
        searched.append(self.sid)
        return search(self, cutoff)

    def forward(self, structures, **options):
        given.append(structures.cutoff)
        return original(self, structures, **options)

    monkeypatch.setattr(Structures, "with_pairs", with_pairs)
    settings = fuller(
        tmp_path, model={"outputs": ["energy"], "feedback": "features"}, shift_images=True
    )
    with monkeypatch.context() as patch:
        patch.setattr(EnergyModel, "forward", forward)
        result = train(settings, console=quiet())
    assert len(searched) == 5 + 2, "each system of both splits, in the first epoch"
    assert given[:-1] == [3.5] * (len(given) - 1), "all but the evaluation at the end"
    weights = load_model(result.checkpoint).state_dict()

    monkeypatch.setattr(
        "flt_mol.training.run_data.with_pairs_in_memory", lambda x, cutoff: (x, None)
    )
    settings.output = str(tmp_path / "without")
    again = load_model(train(settings, console=quiet()).checkpoint).state_dict()
    assert all(torch.allclose(weights[k].float(), again[k].float(), atol=1e-5) for k in weights)


def test_pairs_of_large_sets_are_left_to_the_loader():
    systems = [Structures.single([1, 1], [[0, 0, 0], [1, 0, 0]])] * 3
    with_pairs, left = with_pairs_in_memory(systems, 2.0)
    assert left is None
    assert [len(system.pairs.index_i) for system in with_pairs] == [2, 2, 2]
    # Two pairs take 80 bytes.
    assert with_pairs_in_memory(systems, 2.0, limit=240)[1] is None
    assert with_pairs_in_memory(systems, 2.0, limit=239) == (systems, 2.0)


@pytest.mark.parametrize(
    ("name", "mend"),
    [("y_init", "=.energy,displacement.'"), ("pos_relaxed", "=.energy,energy_initial.'")],
)
def test_a_split_without_the_targets_of_an_output(tmp_path, name, mend):
    settings = fuller(tmp_path, lacking={"of_3": name})
    with pytest.raises(ValueError, match=rf"split 'train': .* for sid slab-3, .*{name}.*{mend}"):
        train(settings, console=quiet())
    assert not (tmp_path / "run").exists()
    settings.model.outputs = ["energy"]
    settings.model.feedback = "features"
    train(settings, console=quiet())


@pytest.mark.filterwarnings("ignore:elements never trained on")
def test_interpolation_asks_for_relaxed_positions_of_the_training_split(tmp_path):
    settings = fuller(
        tmp_path,
        model={"outputs": ["energy"], "feedback": "features"},
        lacking={"of_3": "pos_relaxed"},
        interpolation=0.5,
    )
    message = r"'train': no .* sid slab-3, asked for by training.interpolation=0.5; .*: tr"
    with pytest.raises(ValueError, match=message):
        train(settings, console=quiet())
    assert not (tmp_path / "run").exists()
    paths = settings.data.paths
    paths["train"], paths["val_id"] = paths["val_id"], paths["train"]
    train(settings, console=quiet())


@pytest.mark.filterwarnings("ignore:elements never trained on")
@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("lacking", [{"of_3": "pos_relaxed"}, {"of_1": "y_init"}])
def test_records_that_lack_a_target_are_left_out_on_request(
    tmp_path, monkeypatch, in_memory, lacking
):
    if not in_memory:
        monkeypatch.setattr("flt_mol.training.run_data.IN_MEMORY", 1)
    monkeypatch.setattr("flt_mol.training.run_data._AT_ONCE", 2)
    settings = fuller(tmp_path, lacking=lacking, batch_atoms=11, batch_size=1)
    settings.data.skip_bad = True
    number = int(next(iter(lacking))[-1])
    text = rf"(?s)train.extxyz: left out 1 of 5 records.*#{number}: no .* for sid slab-{number}, as"
    with pytest.warns(UserWarning, match=text) as caught:
        systems = load_split(settings, "train")
    assert sum("left out" in str(warning.message) for warning in caught) == 1
    assert isinstance(systems, list) == in_memory
    kept = [i for i in range(5) if i != number]
    assert [systems[i].sid[0] for i in range(len(systems))] == [f"slab-{i}" for i in kept]
    for i in range(len(systems)):
        assert systems[i].positions_relaxed is not None
        assert systems[i].energy_initial is not None
    with pytest.warns(UserWarning, match="left out 1 of 5"):
        result = train(settings, console=quiet())
    assert load_model(result.checkpoint).normalizer.mean.item() == pytest.approx(sum(kept) / 4)


@pytest.mark.parametrize("skip_bad", [True, False])
def test_bad_records_and_those_that_lack_a_target_are_told_at_once(tmp_path, skip_bad):
    settings = fuller(tmp_path, lacking={"of_0": "pos_relaxed", "of_1": "y_relaxed"})
    settings.data.skip_bad = skip_bad
    if skip_bad:
        with pytest.warns(UserWarning, match="left out 2 of 5 records") as caught:
            assert len(load_split(settings, "train")) == 3
        assert sum("left out" in str(warning.message) for warning in caught) == 1
    else:
        with pytest.raises(ValueError, match="slab-1"):
            load_split(settings, "train")


def test_a_split_in_which_no_record_has_its_targets(tmp_path):
    settings = fuller(tmp_path, lacking={f"of_{i}": "pos_relaxed" for i in range(5)})
    settings.data.skip_bad = True
    with pytest.raises(ValueError, match="'train': every record lacks a target; the first: .*#0"):
        load_split(settings, "train")


def test_what_is_not_needed_may_be_missing(tmp_path):
    settings = fuller(
        tmp_path,
        model={"outputs": ["energy"], "feedback": "features"},
        lacking={"of_3": "pos_relaxed", "of_1": "y_init"},
    )
    settings.data.skip_bad = True
    assert len(load_split(settings, "train")) == 5


def test_the_training_seed_draws_all_initial_weights():
    """But those that are constant or on a fixed grid, whatever the seed."""
    systems = [Structures.single([1], [[0.0, 0, 0]], energy=float(z)) for z in range(2)]
    fixed = {"head.tag_weight"}
    fixed |= {f"encoder.rpe.{part}.log_sigma" for part in ("spectrum", "frequencies")}
    config = RunConfig()
    config.model = EnergyConfig(
        embed_dim=8,
        num_heads=2,
        num_layers=2,
        spectral=SpectralConfig(num_heads=2),
        pairs=PairConfig(vectors=2, filter_vectors=2),
        outputs=["energy", "displacement"],
    )
    every = []
    for seed in range(5):
        settings = replace(config, training=TrainingConfig(seed=seed))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            every.append(build_model(settings, systems))
    assert [model.config.seed for model in every] == [0, 1, 2, 3, 4]
    assert config.model.seed == 0
    for name, weight in every[0].named_parameters():
        if name in fixed or not bool((weight != weight.flatten()[0]).any()):
            continue
        others = [dict(model.named_parameters())[name] for model in every]
        assert len({tuple(other.flatten().tolist()) for other in others}) == 5, name
    drawn = [n for n, b in every[0].named_buffers() if "projection" in n or "direction" in n]
    assert drawn
    for name in drawn:
        assert not torch.equal(*(dict(model.named_buffers())[name] for model in every[:2])), name


def test_training_seed_zero_draws_what_the_model_draws():
    systems = [Structures.single([1], [[0.0, 0, 0]], energy=float(z)) for z in range(2)]
    config = RunConfig(model=EnergyConfig(embed_dim=8, num_heads=2, seed=7))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = build_model(config, systems).state_dict()
        torch.manual_seed(0)
        alone = EnergyModel(config.model).state_dict()
    changed = {"elements_seen", "normalizer.mean", "normalizer.std"}
    assert {k for k in alone if not torch.equal(alone[k], built[k])} <= changed


def test_a_checkpoint_says_which_seed_drew_it(tmp_path):
    settings = config(tmp_path, [-1.0, 0.0, 2.0], seed=3)
    settings.model.seed = 4
    result = train(settings, console=quiet())
    assert load_model(result.checkpoint).config.seed == 7
    again = load_run_config(str(result.folder / "config.yaml"))
    assert (again.model.seed, again.training.seed) == (4, 3)


def test_batches_without_targets_are_named_with_their_split(tmp_path):
    settings = fuller(tmp_path)
    systems = list(open_dataset(settings.data.paths["train"]))
    task = EnergyTask(build_model(settings, systems), settings.training, 10, splits=("a", "b"))
    bare = replace(systems[0], positions_relaxed=None)
    for step, split in ((task.training_step, "a"), (task.validation_step, "b")):
        with pytest.raises(ValueError, match=f"split '{split}': .* no relaxed positions for sid"):
            step(bare, 0)


def test_losses_are_checked_before_anything_is_made(tmp_path):
    settings = fuller(tmp_path, loss=LossConfig(pass_weights=[1.0, 1.0]))
    with pytest.raises(ValueError, match="loss.pass_weights has 2 weights, and .* 3 passes"):
        train(settings, console=quiet())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_optimisers(name):
    training = TrainingConfig(
        optimizer=name, learning_rate=0.1, warmup_steps=4, weight_decay=0.25, beta1=0.8, eps=1e-3
    )
    task = EnergyTask(EnergyModel(EnergyConfig(embed_dim=8)), training, 10)
    optimizer = task.configure_optimizers()["optimizer"]
    assert type(optimizer).__name__.lower() == name
    (group,) = optimizer.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.98), 1e-3, 0.25)
    assert group["lr"] == pytest.approx(0.025), "the first of four warm-up steps"


def test_warmup_in_steps():
    factor = learning_rate_factor(100, 0.5, "linear", warmup_steps=10)
    assert [factor(step) for step in (0, 9, 55, 100)] == pytest.approx([0.1, 1.0, 0.5, 0.0])
    assert learning_rate_factor(100, 0.5, "linear", warmup_steps=0)(0) == 1.0
    assert learning_rate_factor(10, 0.5, "linear", warmup_steps=1000)(9) == pytest.approx(0.01)


def test_a_gradient_that_is_not_finite_stops_with_the_sids(tmp_path, monkeypatch):
    settings = config(tmp_path, [-1.0, 0.0, 2.0])

    def clip(self, *args, **kwargs):
        next(p for p in self.model.parameters() if p.grad is not None).grad.fill_(math.inf)
        return clipping(self, *args, **kwargs)

    clipping = EnergyTask.configure_gradient_clipping
    monkeypatch.setattr(EnergyTask, "configure_gradient_clipping", clip)
    with pytest.raises(ValueError, match=r"split 'train'.*gradient is not finite.*sids \[.*0.*\]"):
        train(settings, console=quiet())


def test_the_length_of_the_gradient(tmp_path):
    """One batch an epoch: the first epoch's is that of the initial weights."""
    settings = config(tmp_path, [-1.0, 0.0, 2.0], epochs=1, gradient_clip=1e-3)
    result = train(settings, console=quiet())
    systems = load_split(settings, "train")
    torch.manual_seed(settings.training.seed)
    model = build_model(settings, systems).train()
    batch = Structures.cat(systems)
    training_loss(model(batch), batch, 0.0, LossConfig(), model.normalizers).total.backward()
    norm = math.hypot(*(p.grad.norm().item() for p in model.parameters() if p.grad is not None))
    assert result.best["train/gradient_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.filterwarnings("ignore:elements never trained on")
def test_accumulated_batches_make_the_step_of_one(tmp_path):
    """3 + 3 systems: their mean gradient is that of 6; rounding apart."""
    weights = []
    for name, settings in (("a", {"batch_size": 6}), ("b", {"batch_size": 3, "accumulate": 2})):
        (tmp_path / name).mkdir()
        energies = [-1.0, 0.5, 2.0, -1.2, 0.4, 2.2]
        result = train(config(tmp_path / name, energies, **settings), console=quiet())
        weights.append(torch.load(result.folder / "last.ckpt", weights_only=True)["state_dict"])
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ema_decay", 1.0),
        ("early_stop", 0),
        ("accumulate", 0),
        ("save_minutes", -1.0),
        ("loggers", ["csv", "csv"]),
        ("loggers", ["excel"]),
        ("devices", 0),
    ],
)
def test_settings_of_the_loop_that_cannot_work(tmp_path, key, value):
    with pytest.raises(ValueError, match=rf"training\.{key} is"):
        train(config(tmp_path, [-1.0, 0.0], **{key: value}), console=quiet())


def test_no_loggers(tmp_path):
    result = train(config(tmp_path, [-1.0, 0.0, 2.0], loggers=[]), console=quiet())
    assert not (result.folder / "logs").exists()


def test_a_logger_that_is_not_installed(tmp_path):
    if importlib.util.find_spec("wandb"):
        pytest.skip("it is installed")
    with pytest.raises(ValueError, match="pip install wandb"):
        train(config(tmp_path, [-1.0, 0.0, 2.0], loggers=["wandb"]), console=quiet())


def test_a_split_that_goes_by_another_name_is_pointed_at(tmp_path):
    data = DataConfig(paths={"train": "a.extxyz", "dev": "b.extxyz"})
    with pytest.raises(ValueError, match=r"data.paths.val_id or data.name.*data.validation=dev$"):
        split_path(data, "val_id")
    with pytest.raises(ValueError, match=r"set data.paths.train or data.name; .*data.train=dev$"):
        split_path(replace(data, paths={"dev": "b.extxyz"}), "train")
    with pytest.raises(ValueError, match="validation_fraction.*data split$"):
        split_path(DataConfig(paths={"train": "a.extxyz"}), "val_id")


@pytest.mark.parametrize("energies", [[-1.0, 0.0, 2.0], [-1.0, 0.0, 2.0] * 12])
def test_a_rate_that_is_too_high_is_blamed_and_not_the_systems(tmp_path, energies):
    """One batch an epoch, where validation meets it first; and several."""
    settings = config(tmp_path, energies, learning_rate=1e30, warmup_fraction=0.0, decay="cosine")
    with pytest.raises(ValueError, match="not finite|is nan|is inf") as caught:
        train(settings, console=quiet())
    assert "lower training.learning_rate, 1e+30" in str(caught.value)
    assert re.search(r"after (1 step|\d+ steps) that went well", str(caught.value))


def test_the_first_batch_is_no_matter_of_the_rate(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "flt_mol.training.task.training_loss",
        lambda *args: training_loss(*args)._replace(total=torch.tensor(math.nan)),
    )
    with pytest.raises(ValueError, match=r"the loss is nan on the batch of sids \[[^]]*\]$"):
        train(config(tmp_path, [-1.0, 0.0, 2.0]), console=quiet())


def printed(settings):
    out = Console(record=True, width=80, file=io.StringIO())
    train(settings, console=out)
    return out.export_text()


def test_displacements_are_shown_beside_those_of_atoms_that_stay(tmp_path):
    text = printed(fuller(tmp_path, epochs=1))
    # One atom of the three that are free moves, by 0.3 Å.
    assert re.search(r"displacement \d\.\d{3} Å \(unmoved 0\.100\)", text)


def test_steps_that_end_a_run_early_are_said(tmp_path):
    text = printed(config(tmp_path, [-1.0, 0.0, 2.0], epochs=60, max_steps=1))
    assert "3 systems to train on, 2 to validate" in text
    assert "1 step (training.max_steps ends it in epoch 1 of 60)" in text


def test_all_steps_need_no_words(tmp_path):
    text = printed(config(tmp_path, [-1.0, 0.0, 2.0], max_steps=50))
    assert "2 steps\n" in text


@pytest.mark.parametrize(
    ("systems", "settings", "words"),
    [
        (
            24,
            {"batch_size": 24},
            "24 systems at training.batch_size=24: one step an epoch, 2 in all. Few steps learn "
            "little; training.batch_size=2 makes 12 an epoch\n",
        ),
        (24, {"batch_size": 23}, None),
        (2, {"batch_size": 512}, None),
        (
            5,
            {"batch_size": 2, "accumulate": 4},
            "training.batch_size=2 × accumulate=4: one step an epoch, 2 in all. Few steps learn "
            "little; training.accumulate=1 makes 3 an epoch\n",
        ),
        (5, {"batch_atoms": 100}, "5 systems at training.batch_atoms=100: one step"),
        (5, {"batch_atoms": 8}, None),
    ],
)
def test_one_step_an_epoch_is_advised_against(tmp_path, systems, settings, words):
    energies = [-1.0 + i / systems for i in range(systems)]
    text = printed(config(tmp_path, energies, **settings))
    if words is None:
        assert "one step an epoch" not in text
    else:
        assert text.count(words) == 1


def test_a_checkpoint_knows_what_it_was_trained_on(tmp_path):
    result = train(config(tmp_path, [-1.0, 0.0, 2.0, 9.0]), console=quiet())
    expected = {"systems": 4, "energy_median": 1.0, "most_atoms": 4}
    for name in ("best.ckpt", "last.ckpt"):
        assert load_model(result.folder / name).trained_on == expected


@pytest.mark.filterwarnings("ignore:elements never trained on")
def test_a_total_energy_among_adsorption_energies_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match=r"split 'train': 1 of 5.*#2: -5332 eV; median -1 eV"):
        train(config(tmp_path, [-1.0, 0.0, -5332.0, -1.5, 0.5], epochs=1), console=quiet())


def test_wide_but_even_energies_are_not_far_off():
    energies = np.linspace(-4000.0, 300.0, 50)
    assert len(far_off(energies)) == 0
    assert far_off(np.append(np.full(9, -1.0), [18.5, 40.0, -70.0])).tolist() == [11, 10]
