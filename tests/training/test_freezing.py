import pytest
import torch
from conftest import small_model
from torch import nn

from flt_mol.training.config import TrainingConfig
from flt_mol.training.freezing import freeze, trainable
from flt_mol.training.task import EnergyTask


def frozen_of(model):
    return {name for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("embedding.*", {"embedding.element.weight", "embedding.tag.weight"}),
        ("embedding", {"embedding.element.weight", "embedding.tag.weight"}),
        ("embedding.", {"embedding.element.weight", "embedding.tag.weight"}),
        ("*.tag.*", {"embedding.tag.weight"}),
        ("head.tag_weight", {"head.tag_weight"}),
        ("encoder.blocks.[1-9].ffn.?.bias", {f"encoder.blocks.1.ffn.{i}.bias" for i in (0, 2)}),
    ],
)
def test_patterns(pattern, names):
    model = small_model()
    assert set(freeze(model, [pattern])) == names == frozen_of(model)


def test_several_patterns_add_up_and_none_freezes_nothing():
    model = small_model()
    assert freeze(model, []) == ()
    names = freeze(model, ["embedding.tag", "encoder", "embedding.tag.*"])
    assert "embedding.tag.weight" in names
    assert len(names) == len(set(names)) == len(frozen_of(model))
    assert frozen_of(model).isdisjoint(name for name, _ in model.head.named_parameters())


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["embeding.*"], r"'embeding.\*' matches no parameter; near: .*embedding"),
        (["embedding", "encoder.block.0.*"], r"'encoder.block.0.\*'.*near: .*encoder.blocks.0"),
        (["normalizer.mean"], "matches no parameter"),  # a buffer
        (["qqq"], "names begin with embedding, encoder, head"),
        (["*"], "nothing is left to train"),
        (["Embedding"], "near: embedding"),
    ],
)
def test_patterns_that_do_not_work_change_nothing(patterns, message):
    model = small_model()
    with pytest.raises(ValueError, match=message):
        freeze(model, patterns)
    assert not frozen_of(model)


def test_the_optimiser_has_the_others_only():
    model = small_model()
    freeze(model, ["encoder", "embedding"])
    task = EnergyTask(model, TrainingConfig(), 10)
    (group,) = task.configure_optimizers()["optimizer"].param_groups
    expected = list(model.head.parameters())
    assert [id(p) for p in group["params"]] == [id(p) for p in expected]


def test_trainable_of_a_plain_module_is_all_of_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    assert len(trainable(model)) == 4
    model[0].weight.requires_grad_(False)
    assert [p.shape for p in trainable(model)] == [
        torch.Size([2]),
        torch.Size([1, 2]),
        torch.Size([1]),
    ]
