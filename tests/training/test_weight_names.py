"""Weights are found under whatever wrappers put around their names."""

import pytest
import torch
from conftest import small_model
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim.swa_utils import AveragedModel

from flt_mol.training.checkpoint_file import read_checkpoint
from flt_mol.models.checkpoint import load_model, save_checkpoint
from flt_mol.training.weight_names import _WRAPPERS, model_weights, strip_prefixes


def moved(model, by=1.0):
    """The same model with other weights."""
    with torch.no_grad():
        model.head.tag_weight += by
    return model


def tag_weights(path, **settings):
    return load_model(path, **settings).head.tag_weight.tolist()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.ckpt"


def compiled(model):
    return torch.compile(model, backend="eager")  # the default one loads the code generator


def averaged_model(model):
    average = AveragedModel(model, multi_avg_fn=lambda *args: None)
    average.update_parameters(model)
    return average


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: averaged_model(model),
        lambda model: averaged_model(averaged_model(model)),
        lambda model: compiled(model),
        lambda model: compiled(averaged_model(model)),
        lambda model: averaged_model(compiled(model)),
        lambda model: nn.ModuleDict({"model": averaged_model(compiled(model))}),
    ],
    ids=["averaged", "twice", "compiled", "compiled average", "average of compiled", "deep"],
)
def test_what_wrappers_of_torch_save(wrap, path):
    model = small_model()
    expected = model.head.tag_weight.tolist()
    weights = wrap(model).state_dict()
    assert any(key.endswith("n_averaged") or "_orig_mod" in key for key in weights)
    torch.save({"state_dict": weights}, path)
    assert tag_weights(path) == expected


def test_parts_compiled_or_wrapped_by_themselves(path):
    model = small_model()
    model.encoder.blocks[0] = compiled(model.encoder.blocks[0])
    model.head = nn.DataParallel(model.head)
    weights = model.state_dict()
    assert "encoder.blocks.0._orig_mod.ffn.0.weight" in weights
    assert "head.module.tag_weight" in weights
    torch.save(weights, path)
    assert load_model(path).head.tag_weight.shape == (3,)


class Both(LightningModule):
    """A module that trains a model, keeps its average, and has a weight of its own."""

    def __init__(self, averaged_name):
        super().__init__()
        self.model = small_model()
        self.register_parameter("scale", nn.Parameter(torch.ones(2)))
        setattr(self, averaged_name, averaged_model(self.model))
        moved(self.model)


@pytest.mark.parametrize("name", ["ema", "ema_model", "model_ema", "smooth", "swa"])
def test_of_a_model_and_its_average_the_average_is_taken(name, path):
    module = Both(name)
    torch.save({"state_dict": module.state_dict()}, path)
    assert tag_weights(path) == getattr(module, name).module.head.tag_weight.tolist()
    assert tag_weights(path, averaged=False) == module.model.head.tag_weight.tolist()


@pytest.mark.parametrize("key", ["ema_state_dict", "state_dict_ema", "ema", "model_ema"])
@pytest.mark.parametrize("nested", [False, True])
def test_averages_under_a_key_of_their_own(key, nested, path):
    raw, average = small_model(), moved(small_model())
    weights = averaged_model(average).state_dict()
    torch.save(
        {"model": raw.state_dict(), key: {"state_dict": weights} if nested else weights}, path
    )
    assert tag_weights(path) == average.head.tag_weight.tolist()
    assert tag_weights(path, averaged=False) == raw.head.tag_weight.tolist()


def test_an_average_of_parameters_takes_buffers_from_the_model(path):
    raw, average = small_model(), moved(small_model())
    raw.normalizer.fit(torch.tensor([1.0, 5.0]))
    parameters = dict(average.named_parameters())
    torch.save({"state_dict": raw.state_dict(), "ema": parameters}, path)
    assert tag_weights(path) == average.head.tag_weight.tolist()
    assert load_model(path).normalizer.mean.item() == 3.0


def test_averages_without_names_are_no_weights(path):
    raw = small_model()
    shadow = {"decay": 0.999, "shadow_params": [p.data for p in raw.parameters()]}
    torch.save({"state_dict": raw.state_dict(), "ema": shadow}, path)
    assert tag_weights(path) == raw.head.tag_weight.tolist()


def test_a_training_state_is_not_looked_at_but_for_raw_weights(path):
    average, raw = small_model(), moved(small_model())
    state = {"raw_state_dict": raw.state_dict(), "epoch": 3, "optimizer": {"state": {0: {}}}}
    save_checkpoint(path, average, {}, training_state=state)
    assert tag_weights(path) == average.head.tag_weight.tolist()
    assert tag_weights(path, averaged=False) == raw.head.tag_weight.tolist()
    assert read_checkpoint(path)["training_state"]["epoch"] == 3


def test_several_models_are_refused_by_name(path):
    weights = nn.ModuleDict({"first": small_model(), "second": small_model()}).state_dict()
    torch.save({"state_dict": weights}, path)
    with pytest.raises(ValueError, match=r"a\.ckpt: .*2 models.*'first\.', 'second\.'"):
        load_model(path)


def test_weights_of_a_wrapper_do_not_hide_what_the_model_lacks(path):
    weights = nn.ModuleDict({"net": small_model(), "other": nn.Linear(2, 2)}).state_dict()
    del weights["net.head.tag_weight"]
    torch.save(weights, path)
    with pytest.raises(ValueError, match="missing: head.tag_weight"):
        load_model(path)


def test_no_part_of_a_model_is_called_as_wrappers_are():
    for key in small_model(outputs=["energy", "energy_initial"]).state_dict():
        assert _WRAPPERS.isdisjoint(key.split("."))


def test_names_that_would_become_one_are_kept_apart():
    one, two = torch.ones(1), torch.zeros(1)
    assert strip_prefixes({"a.b": one, "a.module.b": two}) == {"a.b": one, "a.module.b": two}


def test_a_model_at_the_top_does_not_take_weights_from_below():
    model = small_model()
    model.add_module("ema", moved(small_model()))
    weights = model.state_dict()
    expected = weights["head.tag_weight"]
    found = model_weights(weights, averaged=False)
    assert torch.equal(found["head.tag_weight"], expected)
    assert not [key for key in found if key.startswith("ema.")]
    assert torch.equal(model_weights(weights)["head.tag_weight"], expected + 1)


def test_counters_are_dropped_where_no_configuration_shows_the_model():
    one = torch.ones(1)
    assert list(strip_prefixes({"n_averaged": one, "module.a": one, "module.n_averaged": one})) == [
        "a"
    ]
