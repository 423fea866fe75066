"""The draw that eval keeps, and those that training goes through, one every n steps."""

import copy
import io
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flt_mol.nn import FLTAttention, FourierRPE, GaussianFrequencies, GaussianSpectrum
from flt_mol.nn.redraw import Redrawn


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Noise(Redrawn):
    """The smallest module with a draw."""

    def __init__(self, redraw_every=None, seed=0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self._init_redraw(redraw_every, seeded(seed))

    def _draw(self, generator):
        return {"noise": torch.randn(4, generator=generator)}

    def forward(self, x=1.0):
        self.begin_step()
        out = (self.weight * x * self.noise).sin()
        self.watch(out)
        return out


def steps(module, count):
    """The noise of each of so many steps, forward and backward."""
    noises = []
    for _ in range(count):
        module().sum().backward()
        noises.append(module.noise)
    return noises


def saved(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_n_steps_begin_with_a_new_draw(every):
    module = Noise(every)
    before = saved(module)
    noises = steps(module, 7)
    assert torch.equal(noises[0], before["noise"])
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(noises)]
    assert changed == [k % every == 0 for k in range(1, 7)]
    for name, value in saved(module).items():
        assert torch.equal(value, before[name]) == (name != "step_count"), name
    assert int(module.step_count) == 7
    assert torch.equal(module.eval().noise, before["noise"])
    assert torch.equal(module.train().noise, before["noise"])  # until its forward
    module()
    assert not torch.equal(module.noise, before["noise"])


def test_without_redraw_every_nothing_changes_and_nothing_is_counted():
    module = Noise()
    assert set(module.state_dict()) == {"weight", "noise"}
    noises = steps(module, 3)
    assert torch.equal(noises[0], noises[2])
    assert module()._backward_hooks is None


def test_eval_counts_nothing():
    module = Noise(1)
    steps(module, 2)
    before = saved(module)
    steps(module.eval(), 3)
    for name, value in saved(module).items():
        assert torch.equal(value, before[name]), name


def test_a_draw_made_in_inference_mode_serves_training():
    module = Noise(1)
    steps(module, 1)
    with torch.inference_mode():
        module()
    assert not module.noise.is_inference()
    steps(module, 1)
    assert int(module.step_count) == 2


def test_forwards_between_two_backwards_are_one_step():
    module = Noise(1)
    with torch.no_grad():
        module()
    first, second = module(), module()
    assert torch.equal(first, second)
    (first.sum() + second.sum()).backward()
    assert int(module.step_count) == 1
    dropped = module()
    assert torch.equal(module(), dropped)  # the batch of `dropped` was skipped
    late = module().sum()
    first = module().sum()
    late.backward()
    assert int(module.step_count) == 2
    third = module().sum()
    first.backward()  # of the step before: no end of this one
    module()
    assert int(module.step_count) == 3
    third.backward()


def test_a_graph_for_second_derivatives_does_not_end_its_step():
    module, x = Noise(1), torch.tensor(0.3, requires_grad=True)
    forces = []
    for _ in range(2):  # two batches in one loss
        forces += torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    assert int(module.step_count) == 1
    sum(force.square() for force in forces).backward()
    module(x)
    assert int(module.step_count) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_has_the_gradients_of_none(reentrant):
    """A module used twice: the recomputation of the first comes after gradients of the second."""
    grads = []
    for checked in (False, True):
        module = Noise(1)
        x = torch.tensor(0.3, requires_grad=True)
        for _ in range(3):
            y = x
            for _ in range(2):
                if checked:
                    y = checkpoint(module, y, use_reentrant=reentrant).sum()
                else:
                    y = module(y).sum()
            y.backward()
        grads.append(module.weight.grad)
        assert int(module.step_count) == 3
    torch.testing.assert_close(*grads)


def test_a_resumed_run_and_a_copy_go_on_with_the_same_draws():
    module = Noise(2)
    steps(module, 3)
    stream = io.BytesIO()
    torch.save(module.state_dict(), stream)
    stream.seek(0)
    copied = copy.deepcopy(module)
    expected = steps(module, 4)
    other = Noise(2, seed=1)
    steps(other, 1)
    other.load_state_dict(torch.load(stream, weights_only=True))
    for again in (steps(other, 4), steps(copied, 4)):
        assert all(map(torch.equal, again, expected))


def test_an_explicit_redraw_changes_what_is_saved_and_eval():
    for module in (Noise(), Noise(1)):
        steps(module, 2)
        before = saved(module)["noise"]
        graph = module.eval()().sum()
        module.redraw(seeded(7))
        assert torch.equal(module.noise, torch.randn(4, generator=seeded(7)))
        assert not torch.equal(module.state_dict()["noise"], before)
        graph.backward()
        torch.manual_seed(3)
        module.redraw()
        first = module.noise
        torch.manual_seed(3)
        module.redraw()
        assert torch.equal(module.noise, first)


def test_dtype_follows_the_buffers():
    module = Noise(1)
    steps(module, 2)
    noise = module.noise
    module.double()
    module()
    assert module.noise.dtype == torch.float64
    assert int(module.step_count) == 3
    assert noise.dtype == torch.float32


def layer(every):
    generator = seeded()
    frequencies = GaussianFrequencies(
        5, learned_sigma=False, redraw_every=every, generator=generator
    )
    rpe = FourierRPE(GaussianSpectrum(2, 3, generator=generator), frequencies)
    return FLTAttention(8, 2, rpe=rpe, redraw_every=every, generator=generator)


def test_attention_with_an_rpe():
    """Case 24: eval is the same before, between and after steps of training with redraws."""
    module, x = layer(1), torch.randn(6, 8, generator=seeded(1))
    positions = torch.randn(6, 3, generator=seeded(2))
    expected = module.eval()(x, positions).detach()
    outs = []
    for _ in range(3):
        out = module.train()(x, positions)
        out.square().sum().backward()
        outs.append(out.detach())
        assert torch.equal(module.eval()(x, positions), expected)
    assert torch.equal(outs[0], expected)
    assert not torch.allclose(outs[1], outs[0], atol=1e-5)
    assert not torch.allclose(outs[2], outs[1], atol=1e-5)
    counts = {int(m.step_count) for m in module.modules() if isinstance(m, Redrawn)}
    assert counts == {3}
    other = layer(1)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.eval()(x, positions), expected)


def test_what_is_refused():
    with pytest.raises(ValueError, match="redraw_every"):
        Noise(0)
    with pytest.raises(NotImplementedError, match="_draw"):
        Redrawn()._init_redraw(None, None)
