"""Draws that stay, and draws that are renewed every n training forwards."""

import copy
import itertools
import json
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flt_mol.nn.frequencies import ComponentFrequencies, GaussianFrequencies
from flt_mol.nn.redraw import Redrawn
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectrum import GaussianSpectrum

COUNTERS = {"redraw_seed", "draw_count", "forward_count"}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Noise(Redrawn):
    """The smallest module with a draw."""

    def __init__(self, redraw_every=None, seed=0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self._init_redraw(redraw_every, seeded(seed))

    def _draw(self, generator):
        self._set_drawn("noise", torch.randn(4, generator=generator))

    def forward(self, x=1.0):
        self._maybe_redraw()
        return (self.weight * x * self.noise).sin()


def draws(module, forwards):
    """The noise after each of so many forwards."""
    out = []
    for _ in range(forwards):
        module()
        out.append(module.noise)
    return out


def changes(noises):
    return [not torch.equal(a, b) for a, b in itertools.pairwise(noises)]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_n_training_forwards_begin_with_a_new_draw(every):
    module = Noise(every)
    first = module.noise
    noises = draws(module, 7)
    assert torch.equal(noises[0], first)
    assert changes(noises) == [k % every == 0 for k in range(1, 7)]
    assert int(module.forward_count) == 7
    assert int(module.draw_count) == 6 // every


def test_a_draw_is_never_repeated():
    noises = torch.stack(draws(Noise(1), 50))
    assert torch.unique(noises).numel() == noises.numel()


def test_without_redraw_every_nothing_changes_and_nothing_is_counted():
    module = Noise()
    assert set(module.state_dict()) == {"weight", "noise"}
    assert changes(draws(module, 5)) == [False] * 4


def test_in_eval_and_inference_mode_nothing_is_drawn_or_counted():
    module = Noise(1)
    module()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.eval()
    draws(module, 3)
    module.train()
    with torch.inference_mode():
        draws(module, 3)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_forwards_without_gradient_count():
    module = Noise(1)
    with torch.no_grad():
        assert changes(draws(module, 3)) == [True, True]


def test_an_earlier_graph_stays_valid():
    module = Noise(1)
    noise = module.noise
    early = module().sum()
    late = module().sum()
    module.redraw()
    (slope,) = torch.autograd.grad(early, module.weight)
    torch.testing.assert_close(slope, (noise * noise.cos()).sum())
    (slope,) = torch.autograd.grad(late, module.weight)
    assert slope.isfinite()


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_recomputation_of_a_checkpointed_forward_uses_the_same_draw(reentrant):
    plain, saving = Noise(1), Noise(1)
    for step in range(3):
        x = torch.tensor(1.0 + step, requires_grad=True)
        expected = torch.autograd.grad(plain(x).sum(), x)[0]
        checkpoint(saving, x, use_reentrant=reentrant).sum().backward()
        torch.testing.assert_close(x.grad, expected)
    assert int(saving.forward_count) == 3


def test_a_checkpoint_between_two_draws_goes_on_where_it_was():
    module = Noise(3)
    draws(module, 4)
    other = Noise(3, seed=9)
    other.load_state_dict(module.state_dict())
    for mine, its in zip(draws(module, 8), draws(other, 8), strict=True):
        assert torch.equal(mine, its)


NEW_PROCESS = """
import json, sys, torch
from flt_mol.nn.frequencies import GaussianFrequencies
module = GaussianFrequencies(3, learned_sigma=False, redraw_every=2)
module.load_state_dict(torch.load(sys.argv[1], weights_only=True))
torch.manual_seed(int(sys.argv[2]))
out = []
for _ in range(5):
    module._maybe_redraw()
    out.append(module()[0].tolist())
print(json.dumps(out))
"""


def test_a_new_process_continues_the_sequence(tmp_path):
    module = GaussianFrequencies(3, learned_sigma=False, redraw_every=2, generator=seeded())
    for _ in range(3):
        module._maybe_redraw()
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    command = [sys.executable, "-c", NEW_PROCESS, str(tmp_path / "weights.pt"), "5"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = []
    for _ in range(5):
        module._maybe_redraw()
        expected.append(module()[0].tolist())
    assert json.loads(run.stdout) == expected
    assert expected[0] != expected[2]


def test_replicas_stay_equal_whatever_else_they_draw():
    replica = Noise(2)
    other = copy.deepcopy(replica)
    torch.manual_seed(0)
    one = draws(replica, 7)
    torch.manual_seed(1)
    torch.rand(5)
    for mine, its in zip(one, draws(other, 7), strict=True):
        assert torch.equal(mine, its)


def test_old_checkpoints_load_and_new_ones_load_where_nothing_is_redrawn():
    fixed, renewed = Noise(), Noise(1, seed=3)
    seed = renewed.redraw_seed.clone()
    renewed.load_state_dict(fixed.state_dict(), strict=True)
    assert torch.equal(renewed.noise, fixed.noise)
    assert torch.equal(renewed.redraw_seed, seed)
    draws(renewed, 3)
    parent, renewed_parent = torch.nn.Sequential(fixed), torch.nn.Sequential(renewed)
    parent.load_state_dict(renewed_parent.state_dict(), strict=True)
    assert torch.equal(fixed.noise, renewed.noise)
    assert set(fixed.state_dict()) == {"weight", "noise"}


@pytest.mark.parametrize("change", ["half", "double", "bfloat16"])
def test_counters_survive_changes_of_dtype(change):
    module = Noise(2, seed=1)
    draws(module, 3)
    expected = {name: getattr(module, name).clone() for name in COUNTERS}
    getattr(module, change)()
    for name, value in expected.items():
        assert getattr(module, name).dtype == torch.int64
        assert torch.equal(getattr(module, name), value)
    dtype = module.weight.dtype
    module.redraw()
    assert module.noise.dtype == dtype
    assert int(expected["redraw_seed"]) > 2**53  # what a float would have rounded


def test_an_explicit_redraw_works_in_any_mode():
    module = Noise(5).eval()
    first = module.noise
    with torch.inference_mode():
        module.redraw()
    second = module.noise
    assert not second.is_inference()
    assert not torch.equal(first, second)
    module.redraw(seeded(4))
    assert torch.equal(module.noise, torch.randn(4, generator=seeded(4)))
    fixed = Noise()
    torch.manual_seed(0)
    fixed.redraw()
    once = fixed.noise
    torch.manual_seed(0)
    fixed.redraw()
    assert torch.equal(fixed.noise, once)


def test_automatic_draws_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    draws(Noise(1), 4)
    module = GaussianFrequencies(
        4, learned_sigma=False, sampling="sobol", redraw_every=1, generator=seeded()
    )
    for _ in range(3):
        module._maybe_redraw()
    assert torch.equal(torch.get_rng_state(), state)


def test_below_one_is_refused():
    with pytest.raises(ValueError, match="redraw_every is 0"):
        Noise(0)
    with pytest.raises(NotImplementedError, match="_draw"):
        Redrawn().redraw(seeded())


def build(redraw_every):
    spectrum = GaussianSpectrum(2, 3, generator=seeded(1))
    frequencies = ComponentFrequencies.of(
        spectrum, 6, redraw_every=redraw_every, generator=seeded(2)
    )
    return FourierRPE(spectrum, frequencies)


def test_position_features_are_redrawn_and_looking_at_the_mask_is_no_forward():
    rpe, positions = build(1), torch.randn(5, 3, generator=seeded())
    first = rpe(positions)
    assert torch.equal(rpe(positions, redraw=False).basis, first.basis)
    rpe.sampled_mask(positions)
    rpe.ratio()
    assert int(rpe.frequencies.forward_count) == 1
    assert not torch.equal(rpe(positions).basis, first.basis)
    rpe.eval()
    assert torch.equal(rpe(positions).basis, rpe(positions).basis)


def test_learning_a_width_and_redrawing_exclude_each_other():
    with pytest.raises(ValueError, match="learned_sigma=False"):
        GaussianFrequencies(4, redraw_every=10)
    with pytest.raises(ValueError, match="learned_mean=False"):
        GaussianFrequencies(4, learned_sigma=False, learned_mean=True, redraw_every=10)
    GaussianFrequencies(4, learned_sigma=False, redraw_every=10)


def test_compiled_forwards_see_new_draws():
    torch._dynamo.reset()
    rpe, positions = build(None), torch.randn(5, 3, generator=seeded())
    compiled = torch.compile(rpe, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(positions).basis, rpe(positions).basis)
        rpe.frequencies.redraw(seeded(8))
    renewed, twin = build(2), build(2)
    compiled = torch.compile(renewed, backend="aot_eager")
    for _ in range(5):
        torch.testing.assert_close(compiled(positions).basis, twin(positions).basis)
    assert int(renewed.frequencies.forward_count) == 5
