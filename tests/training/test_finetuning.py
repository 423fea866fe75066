"""Runs that start from a checkpoint."""

import csv
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from ase import Atoms
from ase.build import add_adsorbate, fcc111
from ase.constraints import FixAtoms
from ase.io import read, write
from conftest import KINDS, small_model, small_pairs
from rich.console import Console

from flt_mol import Structures
from flt_mol.cli import build_parser, main
from flt_mol.data import open_dataset
from flt_mol.data.recipes import recipe
from flt_mol.data.loader import target_statistics
from flt_mol.evaluation.splits import evaluate_model
from flt_mol.prediction import surface_rule
from flt_mol.training.checkpoints import find_checkpoint, load_model, save_checkpoint
from flt_mol.training.config import DataConfig, RunConfig, TrainingConfig, load_run_config
from flt_mol.training.finetune_config import FinetuneConfig
from flt_mol.training.finetuning import finetune
from flt_mol.training.held_out import load_splits
from flt_mol.training.run import closing_lines, train
from flt_mol.training.starting import start_from

NEW, SEEN = 47, (8, 29)  # Ag; O and Cu
QUIET = Console(quiet=True)


def checkpoint(path, **changes):
    model = small_model(**changes)
    model.normalizer.fit(torch.tensor([-1.0, 1.0]))
    model.mark_seen(SEEN)
    return str(save_checkpoint(path / "start.ckpt", model, {}))


def slabs(path, count=6, metals=("Cu",), energy=lambda i: 0.1 * i):
    frames = []
    for i in range(count):
        slab = fcc111(metals[i % len(metals)], (1, 1, 3), vacuum=6.0)
        add_adsorbate(slab, "O", 1.2 + 0.1 * i, "fcc")
        slab.set_tags([0, 0, 1, 2])
        slab.set_constraint(FixAtoms([0, 1]))
        slab.info = {"y_relaxed": energy(i), "sid": f"slab-{i}"}
        frames.append(slab)
    write(path, frames)
    return str(path)


def systems(count=5, element=29, energy=2.0):
    return [
        Structures.single(
            [element, 8], [[0, 0, 0], [0, 0, 1.5 + 0.1 * i]], tags=[1, 2], energy=energy + i, sid=i
        )
        for i in range(count)
    ]


def started(path, training, settings=None, **finetune):
    """A new model, and what it started from."""
    config = FinetuneConfig(checkpoint=path, **finetune)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = small_model(**{"seed": 5, **(settings or {})})
    return model, start_from(model, config, training, target_statistics(training))


def missed(model, training):
    batch = Structures.cat(training)
    with torch.inference_mode():
        return batch.energy - model.eval()(batch)["energy"]


def test_weights_come_by_name_and_keep_changes_nothing(tmp_path):
    path, training = checkpoint(tmp_path), systems()
    model, start = started(path, training, normalizer="keep")
    for name, value in load_model(path).state_dict().items():
        if name != "config_json":  # the seed differs
            assert torch.equal(model.state_dict()[name], value), name
    assert (start.added, start.unused, start.new_elements, start.shift) == ((), (), (), {})


def test_refit_shifts_by_the_median_and_keeps_the_scale(tmp_path):
    path, training = checkpoint(tmp_path), [*systems(4, energy=-300.0), *systems(1, energy=-200.0)]
    before = missed(load_model(path), training)
    model, start = started(path, training)
    assert start.shift["energy"] == pytest.approx(before.median().item(), abs=1e-4)
    assert missed(model, training).median().abs() < 1e-4
    old = load_model(path).normalizer
    assert torch.equal(model.normalizer.std, old.std)
    assert model.normalizer.mean.item() == pytest.approx(old.mean.item() + start.shift["energy"])
    assert "energy shifted by -" in str(start)


def test_targets_of_another_kind_are_warned_of(tmp_path):
    path = checkpoint(tmp_path)
    with pytest.warns(UserWarning, match=r"energy: targets are -298.*normalizer=refit"):
        started(path, systems(energy=-300.0), normalizer="keep")
    wide = [replace(s, energy=s.energy * 1000) for s in systems()]
    with pytest.warns(UserWarning, match="are they the same quantity, in eV"):
        started(path, wide)


@pytest.mark.parametrize("kind", ["rpe", "pair types", "centred images, pair types"])
def test_new_elements_begin_as_the_mean_of_those_seen(kind, tmp_path):
    path = checkpoint(tmp_path, **KINDS[kind])
    model, start = started(path, systems(element=NEW), KINDS[kind])
    old = load_model(path)
    tables = [
        name
        for name, p in model.named_parameters()
        if name.endswith("element.weight") or len(p) == 119
    ]
    assert len(tables) == {"rpe": 1}.get(kind, 5)
    for name in tables:
        table, before = model.get_parameter(name), old.get_parameter(name)
        assert torch.allclose(table[NEW], before[list(SEEN)].mean(0))
        others = torch.arange(119) != NEW
        assert torch.equal(table[others], before[others])
    assert start.new_elements == ("Ag",)
    assert model.elements_seen.nonzero().flatten().tolist() == [8, 29, 47]


def test_new_elements_of_a_frozen_table_are_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="keeps embedding.element.weight, so Ag"):
        started(checkpoint(tmp_path), systems(element=NEW), freeze=["embedding"])


def test_other_shapes_are_listed_with_the_settings_that_differ(tmp_path):
    path = checkpoint(tmp_path)
    message = (
        r"(?s)start\.ckpt does not fit the model of this run.*wrong shape: encoder.blocks.0.ffn.0"
        r".weight is \(32, 16\), expected \(48, 16\).*model.ffn_dim is 48 here and 32 in the ch"
    )
    with pytest.raises(ValueError, match=message):
        started(path, systems(), {"ffn_dim": 48})


def test_parts_that_one_side_lacks_are_named(tmp_path):
    path = checkpoint(tmp_path, pairs=small_pairs(density=False))
    training = [replace(s, positions_relaxed=s.positions.clone()) for s in systems()]
    settings = {"outputs": ["energy", "displacement"], "pairs": small_pairs(filter=False)}
    model, start = started(path, training, settings)
    assert any(name.startswith("displacement_head.") for name in start.added)
    assert any(name.startswith("encoder.blocks.0.local.") for name in start.unused)
    assert "not in the checkpoint: " in str(start)
    assert "only in the checkpoint: encoder.blocks.0.local" in str(start)
    assert torch.equal(model.head.tag_weight, load_model(path).head.tag_weight)


def run_config(tmp_path, path, training=None, **finetune):
    return RunConfig(
        data=DataConfig(
            paths={"train": slabs(tmp_path / "t.extxyz")}, validation_fraction=0.3, validation="val"
        ),
        model=load_model(path).config,
        training=TrainingConfig(**{"epochs": 2, "batch_size": 4, **(training or {})}),
        finetune=FinetuneConfig(checkpoint=path, **finetune),
        output=str(tmp_path / "run"),
    )


def test_frozen_weights_do_not_move(tmp_path):
    path = checkpoint(tmp_path, dropout=0.1)
    decay = {"weight_decay": 0.5, "learning_rate": 1e-2}
    frozen = ["embedding", "encoder.blocks.0.*", "encoder.rpe"]
    result = train(run_config(tmp_path, path, decay, freeze=frozen), console=QUIET)
    old = dict(load_model(path).named_parameters())
    for name, value in load_model(result.folder / "last.ckpt").named_parameters():
        still = name.startswith(("embedding.", "encoder.blocks.0.", "encoder.rpe."))
        assert torch.equal(value, old[name]) == still, name


def test_what_it_starts_from_is_kept_where_training_makes_it_worse(tmp_path):
    path = checkpoint(tmp_path)
    settings = {"epochs": 2, "batch_size": 3, "learning_rate": 0.5}
    config = run_config(tmp_path, path, settings)
    result = train(config, console=QUIET)
    best, last = (load_model(result.folder / f"{name}.ckpt") for name in ("best", "last"))
    assert result.best["epoch"] == 0
    _, validation = load_splits(config)
    found = evaluate_model(best, validation).metrics
    assert found["mae"] == pytest.approx(result.best["val/mae"])
    assert found["mae"] < evaluate_model(last, validation).metrics["mae"]
    start = load_model(path)
    weights = dict(best.named_parameters())
    assert all(torch.equal(weights[name], p) for name, p in start.named_parameters())


def test_a_run_says_what_it_started_from_and_can_be_made_again(tmp_path, monkeypatch):
    path = checkpoint(tmp_path)
    console = Console(record=True, width=400)
    config = replace(run_config(tmp_path, path, freeze=["embedding"]))
    monkeypatch.chdir(tmp_path)
    config.finetune.checkpoint = "start.ckpt"
    first = train(config, console=console)
    assert f"fine-tuning {path}; energy shifted by" in console.export_text()
    text = yaml.safe_load((first.folder / "config.yaml").read_text())
    assert text["finetune"] == {"checkpoint": path, "freeze": ["embedding"], "normalizer": "refit"}
    monkeypatch.chdir("/")
    again = load_run_config(str(first.folder / "config.yaml"), [f"output={tmp_path / 'again'}"])
    second = train(again, console=QUIET)
    one, two = (load_model(result.checkpoint).state_dict() for result in (first, second))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.load(first.checkpoint, weights_only=True)["config"]["finetune"] == text["finetune"]


def test_fewer_systems_than_a_batch(tmp_path):
    path = checkpoint(tmp_path)
    for count in (2, 3):
        file = slabs(tmp_path / f"{count}.extxyz", count)
        result = finetune(
            path, file, output=tmp_path / f"run{count}", console=QUIET, epochs=1, batch_size=32
        )
        assert np.isfinite(result.best["val/mae"])
    with pytest.raises(ValueError, match="has 1 systems, and data.validation_fraction=0.2 leaves"):
        finetune(path, slabs(tmp_path / "1.extxyz", 1), console=QUIET)


# ---- settings


def write_run(folder, text):
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    return str(folder / "mine.yaml")


def test_the_model_is_the_checkpoints_unless_the_run_says_otherwise(tmp_path):
    path = checkpoint(tmp_path, pairs=small_pairs())
    theirs = load_model(path).config
    start = f"finetune.checkpoint={path}"
    assert load_run_config("emt_small", [start]).model == theirs
    assert load_run_config("finetune", [start]).model == theirs
    file = write_run(
        tmp_path,
        "defaults: [run_schema, {model: emt_small}, _self_]\nmodel: {dropout: 0.2}\n"
        "finetune: {checkpoint: start.ckpt}\n",
    )
    changes = ["model.pairs.vector_dropout=0.1", "model.recycles=2"]
    model = load_run_config(file, changes).model
    pairs = replace(theirs.pairs, vector_dropout=0.1)
    assert model == replace(theirs, dropout=0.2, recycles=2, pairs=pairs)
    assert load_run_config(file, ["model.pairs={norm: false}"]).model.pairs.norm is False
    assert load_run_config(file, ["model.pairs=null"]).model.pairs is None
    assert load_run_config(file, ["finetune.checkpoint=null"]).model.embed_dim == 64
    assert load_run_config("emt_small").model.embed_dim == 64, "the checkpoint's model stayed"


def test_paths_of_checkpoints(tmp_path, monkeypatch):
    path = checkpoint(tmp_path)
    text = "defaults: [run_schema, _self_]\nfinetune: {checkpoint: CHECKPOINT}\n"
    file = write_run(tmp_path, text.replace("CHECKPOINT", "start.ckpt"))
    assert load_run_config(file).finetune.checkpoint == path
    (tmp_path / "it's, a=b").mkdir()
    odd = checkpoint(tmp_path / "it's, a=b")
    monkeypatch.chdir(tmp_path)
    typed = ["finetune.checkpoint=it's, a=b/start.ckpt"]
    assert load_run_config(file, typed).finetune.checkpoint == odd
    file = write_run(tmp_path, text.replace("CHECKPOINT", "emt_small"))
    assert load_run_config(file).finetune.checkpoint == "emt_small"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model=emt_performer_small"], "chooses another model than the checkpoint's"),
        (["finetune.freze=[a]"], "did you mean 'finetune.freeze'"),
        (["finetune.normalizer=fit"], "expected one of refit, keep"),
        (["finetune.checkpoint=nowhere.ckpt"], "no checkpoint at 'nowhere.ckpt'"),
        (["finetune.checkpoint="], "finetune.checkpoint is empty"),
        (["finetune.checkpoint=null", "finetune.freeze=[head]"], "there is no finetune.checkpoint"),
        (["data.validation_fraction=1.0"], "expected null, or within 0 and 1"),
        (["data.validation_fraction=0"], "expected null, or within 0 and 1"),
        (["data.paths.val=x", "data.validation_fraction=0.1"], "leave one .*fraction=null takes"),
        (["data.paths.val=x", "data={validation_fraction: 0.1}"], "leave one of them out"),
        (["model.embed_dm=3"], "did you mean 'model.embed_dim'"),
    ],
)
def test_settings_that_cannot_work(changes, message):
    with pytest.raises(ValueError, match=message):
        load_run_config("finetune", ["finetune.checkpoint=emt_small", *changes])


def test_a_checkpoint_inside_a_mapping_is_not_missed():
    with pytest.raises(ValueError, match="give finetune.checkpoint in the file itself, or as"):
        load_run_config("finetune", ["finetune={checkpoint: emt_small}"])


def test_overrides_may_come_before_and_after_the_option(capsys):
    from flt_mol.cli import _parse

    for arguments in (
        ["--finetune", "x", "c", "a=1", "b=2"],
        ["c", "--finetune", "x", "a=1", "b=2"],
        ["c", "a=1", "--finetune", "x", "b=2"],
        ["c", "a=1", "b=2", "--finetune=x"],
    ):
        options = _parse(["train", *arguments])
        assert (options.config, options.overrides, options.finetune) == ("c", ["a=1", "b=2"], "x")
    for wrong in (["train", "c", "--fintune", "x"], ["predict", "m", "f", "-o", "a.csv", "more"]):
        with pytest.raises(SystemExit):
            _parse(wrong)
        assert "unrecognized arguments" in capsys.readouterr().err
    assert build_parser().parse_args(["train", "c"]).finetune is None


# ---- held out


def test_a_share_is_held_out_by_seed_and_recorded(tmp_path):
    config = run_config(tmp_path, checkpoint(tmp_path))
    training, validation = load_splits(config)
    names = [{s.sid[0] for s in part} for part in (training, validation)]
    assert len(names[0]) == 4
    assert len(names[1]) == 2
    assert names[0] | names[1] == {f"slab-{i}" for i in range(6)}
    assert [s.sid for s in load_splits(config)[1]] == [s.sid for s in validation]
    others = [
        tuple(s.sid[0] for s in load_splits(replace(config, training=TrainingConfig(seed=k)))[1])
        for k in range(6)
    ]
    assert len(set(others)) > 1
    result = train(config, console=QUIET)
    with (result.folder / "held_out.csv").open() as file:
        assert {row["sid"] for row in csv.DictReader(file)} == names[1]


def test_large_sets_are_held_out_of_without_reading_them(tmp_path, monkeypatch):
    monkeypatch.setattr("flt_mol.training.run_data.IN_MEMORY", 2)
    config = run_config(tmp_path, checkpoint(tmp_path))
    training, validation = load_splits(config)
    assert not isinstance(training, list)
    assert training.natoms().tolist() == [4] * 4
    names = {part[i].sid[0] for part in (training, validation) for i in range(len(part))}
    assert len(names) == 6
    assert np.isfinite(train(config, console=QUIET).best["val/mae"])


def test_without_validation_the_ways_to_one_are_named(tmp_path):
    config = run_config(tmp_path, checkpoint(tmp_path))
    config.data.validation_fraction = None
    with pytest.raises(ValueError, match=r"data.validation_fraction=0.1, or .*flt-mol data split"):
        train(config, console=QUIET)


# ---- the whole road


def ase_atoms(system):
    atoms = Atoms(
        system.atomic_numbers.numpy(),
        system.positions.numpy(),
        cell=system.cell[0].numpy(),
        pbc=system.pbc[0].numpy(),
        tags=system.tags.numpy(),
    )
    atoms.info = {"y_relaxed": float(system.energy[0]), "sid": str(system.sid[0])}
    return atoms


@pytest.fixture(scope="module")
def adsorbates():
    """Systems with adsorbates that emt_small was never trained on: 20 to train on, and 120."""
    split = recipe("emt_adsorption").open("val_ood_ads")
    order = np.random.default_rng(0).permutation(len(split))[:140].tolist()
    return [split[i] for i in order[:20]], [split[i] for i in order[20:]]


def test_twenty_structures_beat_the_checkpoint_and_a_model_from_scratch(adsorbates, tmp_path):
    training, others = adsorbates
    file = tmp_path / "train.extxyz"
    write(file, [ase_atoms(s) for s in training])
    tuned = finetune("emt_small", file, output=tmp_path / "tuned", console=QUIET)
    rates = replace(load_run_config("finetune").training, learning_rate=2e-3)
    data = DataConfig(paths={"train": str(file)}, validation="val", validation_fraction=0.2)
    model = load_run_config("emt_small").model
    fresh = RunConfig(data=data, model=model, training=rates, output=str(tmp_path / "fresh"))
    scratch = train(fresh, console=QUIET)
    before, after, without = (
        evaluate_model(load_model(name), others).metrics["mae"]
        for name in ("emt_small", tuned.folder / "last.ckpt", scratch.folder / "last.ckpt")
    )
    assert before > 0.3  # the card says 0.312
    assert after < 0.7 * before
    assert after < 0.7 * without


def test_the_command(adsorbates, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("train.extxyz", [ase_atoms(s) for s in adsorbates[0][:6]])
    arguments = [
        "data.paths.train=train.extxyz",
        "data.validation=mine",
        "training.epochs=1",
        "finetune.freeze=[encoder.*]",
    ]
    assert main(["train", "finetune", "--finetune", "emt_small", *arguments, "output=run"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "parameters frozen" in out
    assert re.search(r"epoch 0 MAE mine .*epoch 1/1 .* mine 0.*best epoch [01]: mine MAE", out)
    assert main(["evaluate", "run", "--data", "train.extxyz"]) == 0
    assert load_model("run").config == load_model("emt_small").config


def test_settings_of_the_call(tmp_path):
    with pytest.raises(ValueError, match="unknown key 'training.epoch'; did you mean"):
        finetune("emt_small", "x.extxyz", epoch=3)
    path, file = checkpoint(tmp_path), slabs(tmp_path / "a.extxyz")
    result = finetune(
        path, file, slabs(tmp_path / "b.extxyz", 2), output=tmp_path / "run", console=QUIET,
        freeze=["encoder"], normalizer="keep", epochs=1, seed=3,
    )  # fmt: skip
    config = torch.load(result.checkpoint, weights_only=True)["config"]
    assert config["finetune"] == {"checkpoint": path, "freeze": ["encoder"], "normalizer": "keep"}
    assert config["data"]["paths"]["val"] == str(tmp_path / "b.extxyz")
    assert config["data"]["validation_fraction"] is None
    assert config["training"]["seed"] == 3
    assert not (result.folder / "held_out.csv").exists()


def test_the_tag_rule_of_what_it_started_from_goes_with_it(tmp_path, monkeypatch):
    start = shutil.copy(find_checkpoint("emt_small"), tmp_path / "copy.ckpt")
    file = slabs(tmp_path / "a.extxyz")
    settings = {"epochs": 1, "console": QUIET}
    tuned = finetune(start, file, output=tmp_path / "one", **settings)
    again = finetune(tuned.folder, file, output=tmp_path / "two", **settings)
    (tmp_path / "copy.ckpt").unlink()
    shutil.rmtree(tuned.folder)
    assert surface_rule(again.folder) == "half"
    export = tmp_path / "export"
    assert main(["export", str(again.folder), str(export)]) == 0
    assert surface_rule(export) == "half"
    assert str(tmp_path) not in (export / "config.json").read_text()
    said = finetune(again.folder, file, output=tmp_path / "said", tag_rule=1, **settings)
    assert surface_rule(said.folder) == 1
    with pytest.raises(ValueError, match="data.tag_rule is 'hlf', expected oc20, half or a number"):
        load_run_config("finetune", ["finetune.checkpoint=emt_small", "data.tag_rule=hlf"])
    typed = ["finetune.checkpoint=emt_small", "data.tag_rule=2"]
    assert load_run_config("finetune", typed).data.tag_rule == "2"


def test_the_largest_system_of_both_trainings_counts(tmp_path):
    model = small_model()
    model.trained_on = {"systems": 100, "energy_median": 5.0, "most_atoms": 52}
    path = save_checkpoint(tmp_path / "before.ckpt", model, {})
    atoms = [Structures.single([29, 8], [[0, 0, 0], [0, 0, 2]], energy=e) for e in (-1.0, 1.0, 2.0)]
    after = small_model()
    start_from(after, FinetuneConfig(checkpoint=str(path)), atoms, target_statistics(atoms))
    assert after.trained_on == {"systems": 3, "energy_median": 1.0, "most_atoms": 52}


# ---- outputs without targets


def with_displacements(tmp_path, **changes):
    outputs = ["energy", "displacement"]
    return checkpoint(tmp_path, outputs=outputs, pairs=small_pairs(), **changes)


def relaxed(path, which):
    """The file with relaxed positions in some of its frames."""
    frames = read(path, ":")
    for i, frame in enumerate(frames):
        if i in which:
            frame.arrays["pos_relaxed"] = frame.positions + 0.1
    write(path, frames)
    return path


def test_an_output_that_no_structure_has_targets_for_is_left_out(tmp_path):
    path, file = with_displacements(tmp_path), slabs(tmp_path / "a.extxyz")
    console = Console(record=True, width=400)
    settings = {"normalizer": "keep", "output": tmp_path / "run", "epochs": 2}
    learning = {"learning_rate": 1e-9, "rotation": "none", "shift_images": False}
    result = finetune(path, file, console=console, **settings, **learning)
    out = console.export_text()
    assert "no training structure holds pos_relaxed: trained without the checkpoint's output" in out
    model = load_model(result.folder)
    assert model.config.outputs == ["energy"]
    assert not any(name.startswith("displacement_head") for name in model.state_dict())
    data = open_dataset(file)
    before, after = (evaluate_model(load_model(x), data) for x in (path, result.folder))
    assert after.metrics["mae"] == pytest.approx(before.metrics["mae"], abs=1e-5)
    content = torch.load(result.checkpoint, weights_only=True)
    assert content["config"]["model"]["outputs"] == ["energy"]
    assert finetune(path, file, console=QUIET, **settings, **learning).was_finished
    again = str(result.folder / "config.yaml")
    assert load_run_config(again).model.outputs == ["energy"]


def test_the_command_leaves_it_out_and_a_weight_with_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slabs("a.extxyz")
    arguments = ["--finetune", "flt-small", "data.paths.train=a.extxyz", "training.epochs=1"]
    weights = ["loss.displacement_weight=2.0", "loss.displacement_decay=linear"]
    assert main(["train", "finetune", *arguments, *weights, "output=run"]) == 0
    assert "trained without the checkpoint's output displacement" in capsys.readouterr().out
    assert main(["train", "finetune", *arguments, *weights, "output=run"]) == 0
    assert "is finished" in capsys.readouterr().out
    assert main(["evaluate", "run"]) == 0


def _interrupted(*_args):
    # Raised from exec, it would end the whole process by SIGINT when the tests are done.
    raise KeyboardInterrupt


def test_a_run_that_was_broken_off_goes_on_without_it(tmp_path, monkeypatch):
    path, file = with_displacements(tmp_path), slabs(tmp_path / "a.extxyz")
    whole = finetune(path, file, output=tmp_path / "whole", epochs=2, console=QUIET)
    finish = "flt_mol.training.run._finish"
    with monkeypatch.context() as patch:
        patch.setattr(finish, _interrupted)
        with pytest.raises(KeyboardInterrupt):
            finetune(path, file, output=tmp_path / "run", epochs=2, console=QUIET)
    result = finetune(path, file, output=tmp_path / "run", epochs=2, console=QUIET)
    one, other = (load_model(x.folder / "last.ckpt").state_dict() for x in (whole, result))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_where_some_structures_have_the_target_the_options_are_told(tmp_path, monkeypatch):
    path = with_displacements(tmp_path)
    file = relaxed(slabs(tmp_path / "a.extxyz"), {0, 1, 2, 4})
    message = r"for sid slab-3, asked.*\(data.skip_bad=true\), or train without it: 'model.outputs"
    with pytest.raises(ValueError, match=message + r"=\[energy\]'$"):
        finetune(path, file, output=tmp_path / "run", console=QUIET)
    result = finetune(
        path, file, outputs=["energy"], output=tmp_path / "a", epochs=1, console=QUIET
    )
    assert load_model(result.folder).config.outputs == ["energy"]
    file = relaxed(file, range(6))
    result = finetune(path, file, output=tmp_path / "b", epochs=1, console=QUIET)
    assert load_model(result.folder).config.outputs == ["energy", "displacement"]


def test_outputs_that_the_run_itself_asks_for_stay(tmp_path):
    config = run_config(tmp_path, checkpoint(tmp_path, pairs=small_pairs()))
    config.model = replace(config.model, outputs=["energy", "displacement"])
    config.loss.displacement_weight = 3.0
    with pytest.raises(ValueError, match="give it as pos_relaxed, or train without it: ") as caught:
        train(config, console=QUIET)
    assert "'model.outputs=[energy]' loss.displacement_weight=null" in str(caught.value)
    assert "skip_bad" not in str(caught.value), "it would leave nothing"


def test_positions_that_energies_depend_on_are_not_left_out(tmp_path):
    path = with_displacements(tmp_path, recycles=2, feedback="positions")
    with pytest.raises(ValueError, match="no relaxed positions for sid slab-0"):
        train(run_config(tmp_path, path), console=QUIET)


def test_a_validation_file_takes_the_place_of_the_share_by_default(tmp_path):
    typed = ["finetune.checkpoint=emt_small", "data.paths.val=b.extxyz"]
    assert load_run_config("finetune", typed).data.validation_fraction is None
    assert load_run_config("finetune", typed[:1]).data.validation_fraction == 0.2
    text = "defaults: [run_schema, _self_]\ndata: {validation: val, validation_fraction: 0.3}\n"
    with pytest.raises(ValueError, match=r"data.validation_fraction is 0.3 and data.paths.val na"):
        load_run_config(write_run(tmp_path, text), typed)


def test_a_run_that_gained_nothing_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = checkpoint(tmp_path)
    slabs("a.extxyz")
    arguments = ["train", "finetune", "--finetune", start, "data.paths.train=a.extxyz"]
    rate = ["training.epochs=1", "training.learning_rate=0.5", "output=run"]
    for _ in range(2):  # the second finds it finished
        assert main([*arguments, *rate]) == 0
        out = capsys.readouterr().out
        assert f"training gained nothing over what it started from, {start}: best.ckpt is" in out
        assert out.index("best epoch 0: val MAE") < out.index("gained nothing")
    gained = {"epoch": 3.0, "val/mae": 0.1, "val/ewt": 0.1}
    config = load_run_config("finetune", [f"finetune.checkpoint={start}"])
    assert len(closing_lines(config, gained)) == 1
