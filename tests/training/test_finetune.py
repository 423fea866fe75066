"""Runs that start from a checkpoint."""

import io
import re
from dataclasses import replace

import pytest
import torch
import yaml
from rich.console import Console
from slabs import platinum
from torch import nn

from flt_mol import Structures
from flt_mol.data.loader import target_statistics
from flt_mol.evaluation import evaluate_checkpoint
from flt_mol.evaluation.splits import evaluate_model
from flt_mol.models.checkpoint import load_model, read_checkpoint, save_checkpoint
from flt_mol.models.config import EnergyConfig
from flt_mol.models.energy import EnergyModel
from flt_mol.training.config import FinetuneConfig
from flt_mol.training.data import load_splits, without_idle_outputs
from flt_mol.training.finetune import freeze, start_from
from flt_mol.training.run import closing_lines, finetune
from helpers.training import SMALL, go, tiny_run

NEW, SEEN = 47, (8, 29)  # Ag; O and Cu
PAIRS = {"cutoff": 3.5, "num_basis": 8, "pair_types": True}


def checkpoint(folder, systems=None, seen=SEEN, **settings):
    torch.manual_seed(1)
    model = EnergyModel(EnergyConfig.model_validate({**SMALL, **settings}))
    model.normalizer.fit(torch.tensor([-1.0, 1.0]))
    model.mark_seen(seen)
    config = {"data": {"tag_rule": "half"}}
    return str(save_checkpoint(folder / "start.ckpt", model, config, systems=systems))


def systems(count=5, element=29, energy=2.0):
    return [
        Structures.single(
            [element, 8], [[0, 0, 0], [0, 0, 1.5 + 0.1 * i]], tags=[1, 2], energy=energy + i, sid=i
        )
        for i in range(count)
    ]


def started(path, training, settings=None, **finetune):
    """A new model, and the line that says what it started from."""
    torch.manual_seed(5)
    model = EnergyModel(EnergyConfig.model_validate({**SMALL, "seed": 5, **(settings or {})}))
    config = FinetuneConfig(checkpoint=path, **finetune)
    return model, start_from(model, config, training, target_statistics(training))


def missed(model, training):
    batch = Structures.cat(training)
    with torch.inference_mode():
        return batch.energy - model.eval()(batch)["energy"]


def test_weights_come_by_name_and_keep_changes_nothing(tmp_path):
    path = checkpoint(tmp_path)
    model, line = started(path, systems(), normalizer="keep")
    assert line == f"fine-tuning {path}"
    for name, value in load_model(path).state_dict().items():
        if name != "config_json":  # the seed differs
            assert torch.equal(model.state_dict()[name], value), name


def test_refit_shifts_by_the_median_and_keeps_the_scale(tmp_path):
    path, training = checkpoint(tmp_path), [*systems(4, energy=-300.0), *systems(1, energy=-200.0)]
    shift = missed(load_model(path), training).median()
    model, line = started(path, training)
    assert model.training
    assert missed(model, training).median().abs() < 1e-4
    old = load_model(path).normalizer
    assert torch.equal(model.normalizer.std, old.std)
    assert float(model.normalizer.mean - old.mean) == pytest.approx(float(shift), abs=1e-4)
    assert "energy shifted by -29" in line


def test_targets_of_another_kind_are_warned_of(tmp_path):
    path = checkpoint(tmp_path)
    with pytest.warns(UserWarning, match=r"finetune\.normalizer=refit"):
        started(path, systems(energy=-300.0), normalizer="keep")
    wide = [replace(s, energy=s.energy * 1000) for s in systems()]
    with pytest.warns(UserWarning, match=r"after a shift of"):
        started(path, wide)


@pytest.mark.parametrize("settings", [{}, {"pairs": PAIRS}])
def test_new_elements_start_as_the_mean_of_those_seen(settings, tmp_path):
    path = checkpoint(tmp_path, **settings)
    model, line = started(path, systems(element=NEW), settings)
    old = load_model(path)
    tables = [name for name, p in model.named_parameters() if len(p) == 119]
    assert len(tables) == (1 if not settings else 5)
    for name in tables:
        table, before = model.get_parameter(name), old.get_parameter(name)
        torch.testing.assert_close(table[NEW], before[list(SEEN)].mean(0))
        others = torch.arange(119) != NEW
        assert torch.equal(table[others], before[others])
    assert "new elements: Ag" in line
    assert model.elements_seen.nonzero().flatten().tolist() == [8, 29, 47]


def test_other_shapes_are_listed_with_the_settings_that_differ(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)start\.ckpt.*\(8, 8\).*model\.ffn_dim=8, here 48"):
        started(checkpoint(tmp_path), systems(), {"ffn_dim": 48})


def test_parts_that_one_side_lacks_are_named(tmp_path):
    path = checkpoint(tmp_path, pairs={**PAIRS, "density": False})
    settings = {"outputs": ["energy", "displacement"], "pairs": {**PAIRS, "filter": False}}
    model, line = started(path, systems(), settings)
    assert "not in the checkpoint: " in line
    assert re.search(r"only in the checkpoint: encoder \(\d+ weights\)", line)
    assert torch.equal(model.head.tag_weight, load_model(path).head.tag_weight)


def net():
    return nn.ModuleDict({"ab": nn.Linear(2, 2), "a": nn.ModuleList([nn.Linear(2, 1)])})


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ([], ()),
        (["a"], ("a.0.weight", "a.0.bias")),
        (["a.*"], ("a.0.weight", "a.0.bias")),
        (["*.bias"], ("ab.bias", "a.0.bias")),
        (["a.[01].bias", "ab.weight"], ("ab.weight", "a.0.bias")),
    ],
)
def test_patterns_of_parameters(patterns, names):
    model = net()
    assert freeze(model, patterns) == names
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == set(names)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [(["ab.wieght"], "ab.weight"), (["x"], "'x'"), (["*"], "nothing is left"), ([""], "''")],
)
def test_patterns_that_do_not_work_change_nothing(patterns, message):
    model = net()
    with pytest.raises(ValueError, match=message):
        freeze(model, ["a", *patterns])
    assert all(p.requires_grad for p in model.parameters())


def tuning(folder, path, training=None, outputs=None, lacking=None, **finetune):
    """A run of six slabs, of which two are held out."""
    config = load_model(path).config.model_dump()
    return tiny_run(
        folder,
        6,
        model={**config, "outputs": outputs or config["outputs"]},
        data={"validation_fraction": 0.3},
        lacking=lacking,
        finetune={"checkpoint": path, **finetune},
        **{"batch_size": 4, **(training or {})},
    )


def test_frozen_weights_do_not_move(tmp_path):
    path = checkpoint(tmp_path, dropout=0.1, seen=(8, 29, 47, 79))
    frozen = ["embedding", "encoder.blocks.0.*", "encoder.rpe"]
    settings = {"weight_decay": 0.5, "learning_rate": 1e-2}
    result = go(tuning(tmp_path, path, settings, freeze=frozen))
    old = dict(load_model(path).named_parameters())
    for name, value in load_model(result.folder / "last.ckpt").named_parameters():
        still = name.startswith(("embedding.", "encoder.blocks.0.", "encoder.rpe."))
        assert torch.equal(value, old[name]) == still, name


def test_what_it_starts_from_is_kept_where_training_makes_it_worse(tmp_path):
    path = checkpoint(tmp_path)
    config = tuning(tmp_path, path, {"learning_rate": 0.5, "epochs": 3})
    stream = io.StringIO()
    result = go(config, console=Console(file=stream, width=400))
    assert result.best["epoch"] == 0
    best, last = (load_model(result.folder / f"{name}.ckpt") for name in ("best", "last"))
    validation = load_splits(config)[1]
    found = evaluate_model(best, validation, warn=False).metrics
    assert found["mae"] == pytest.approx(result.best["val/mae"])
    assert found["mae"] < evaluate_model(last, validation, warn=False).metrics["mae"]
    assert f"fine-tuning {path}; energy shifted by" in stream.getvalue()
    assert "epoch    0  MAE val " in stream.getvalue()
    assert "did not improve on" in closing_lines(config, result.best)[1]


def test_what_a_run_notes_of_its_start(tmp_path, monkeypatch):
    path = checkpoint(tmp_path, systems={"trained": ["old-1", "slab-0"]})
    config = tuning(tmp_path, path)
    monkeypatch.chdir(tmp_path)
    config.finetune.checkpoint = "start.ckpt"
    result = go(config)
    settings = yaml.safe_load((result.folder / "config.yaml").read_text())
    assert settings["finetune"]["checkpoint"] == path
    content = read_checkpoint(result.checkpoint)
    assert content["config"]["data"]["tag_rule"] == "half"
    trained, held_out = content["systems"]["trained"], content["systems"]["held_out"]
    assert {"old-1", "slab-0"} <= set(trained)
    assert set(trained) | set(held_out) == {"old-1", *(f"slab-{i}" for i in range(6))}


def test_outputs_without_targets_are_dropped(tmp_path):
    path = checkpoint(tmp_path, pairs=PAIRS, outputs=["energy", "displacement"])
    config = tuning(tmp_path, path, {"epochs": 1}, lacking=dict.fromkeys(range(6), "pos_relaxed"))
    stream = io.StringIO()
    result = go(config, console=Console(file=stream, width=400))
    assert "trained without displacement" in stream.getvalue()
    assert load_model(result.checkpoint).config.outputs == ["energy"]
    assert go(config).was_finished
    config = tuning(tmp_path, path, lacking={3: "pos_relaxed"})
    with pytest.raises(ValueError, match=r"slab-3.*model\.outputs=\[energy\]"):
        go(config, tmp_path / "other")


def test_outputs_of_which_energies_depend_stay(tmp_path):
    settings = {"outputs": ["energy", "displacement"], "recycles": 2, "feedback": "positions"}
    path = checkpoint(tmp_path, pairs=PAIRS, **settings)
    config = tuning(tmp_path, path, lacking=dict.fromkeys(range(6), "pos_relaxed"))
    assert without_idle_outputs(config) == (config, [])


@pytest.mark.slow
def test_structures_in_memory(tmp_path):
    slabs = [platinum() for _ in range(6)]
    for i, slab in enumerate(slabs):
        slab.positions[-2:, 2] += 0.05 * i
        slab.info = {"sid": f"s{i}", "E": -1.0 - 0.1 * i}
    settings = ["training.epochs=1", "training.batch_size=4"]
    result = finetune("emt-small", slabs, tmp_path / "run", settings, energy="E")
    assert result.checkpoint == tmp_path / "run" / "best.ckpt"
    systems = read_checkpoint(result.checkpoint)["systems"]
    assert {f"s{i}" for i in range(6)} <= {*systems["trained"], *systems["held_out"]}
    _, results = evaluate_checkpoint(tmp_path / "run")
    assert len(results["val"].sid) == 1
    with pytest.raises(ValueError, match="no targets"):
        finetune("emt-small", slabs, tmp_path / "other", settings)
