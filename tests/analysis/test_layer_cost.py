import pytest
import torch

from flt_mol.analysis import layer_cost as module
from flt_mol.analysis.layer_cost import LayerSize, layer_cost

SMALL = LayerSize(tokens=64, embed_dim=16, num_heads=2, num_features=8, num_frequencies=4)


@pytest.mark.parametrize("part", ["block", "attention"])
def test_ratios_are_those_of_the_layers_that_are_timed(part):
    state = torch.get_rng_state()
    cost = layer_cost(SMALL, part, rounds=2)
    assert cost.forward == cost.timings.ratio("forward, RPE", over="forward")
    assert cost.training == cost.timings.ratio("training, RPE", over="training")
    assert cost.forward_memory == cost.bytes["forward, RPE"] / cost.bytes["forward"]
    assert cost.training_memory == cost.bytes["training, RPE"] / cost.bytes["training"]
    assert cost.bytes["training"] > cost.bytes["forward"] > 4 * 64 * 16
    assert torch.equal(torch.get_rng_state(), state)


def test_a_block_costs_more_than_its_attention():
    block, attention = (layer_cost(SMALL, part, 1).bytes for part in ("block", "attention"))
    assert block["training"] > attention["training"]


def test_the_rpe_is_computed_in_every_call(monkeypatch):
    calls = []
    forward = module.FourierRPE.forward

    def counted(self, *args, **kwargs):
        calls.append(1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(module.FourierRPE, "forward", counted)
    runs = module._runs(SMALL, "block")
    for name, run in runs.items():
        calls.clear()
        run(), run()
        assert len(calls) == (2 if name.endswith("RPE") else 0)


def test_backward_reaches_everything_that_learns():
    gradients = module._runs(SMALL, "block")["training, RPE"]()
    assert len(gradients) == 1 + 3 + 8 + 8  # x, RPE, attention, norms and feed-forward net
    assert all(gradient.abs().max() > 0 for gradient in gradients if gradient.dim() > 1)


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="expected one of block, attention"):
        layer_cost(SMALL, "head")
