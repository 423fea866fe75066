"""The draw that eval keeps, and those that training goes through, one every n steps."""

import copy
import io
import itertools
import json
import pickle
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flt_mol.nn import FLTAttention, FLTBlock, FLTEncoder
from flt_mol.nn.frequencies import ComponentFrequencies, GaussianFrequencies
from flt_mol.nn.redraw import Redrawn
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectrum import GaussianSpectrum

COUNTERS = {"redraw_seed", "draw_count", "step_count"}


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
        self._count_step()
        out = (self.weight * x * self._drawn("noise")).sin()
        self._watch(out)
        return out


def steps(module, count):
    """The noise of each of so many steps, forward and backward."""
    noises = []
    for _ in range(count):
        module().sum().backward()
        noises.append(module._drawn("noise"))
    return noises


def changes(noises):
    return [not torch.equal(a, b) for a, b in itertools.pairwise(noises)]


def saved(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_n_steps_begin_with_a_new_draw(every):
    module = Noise(every)
    noises = steps(module, 7)
    assert torch.equal(noises[0], module.noise)
    assert changes(noises) == [k % every == 0 for k in range(1, 7)]
    assert int(module.step_count) == 7
    assert int(module.draw_count) == 0


def test_a_draw_is_never_repeated_not_even_by_explicit_ones():
    module = Noise(1)
    noises = steps(module, 50)
    for _ in range(50):
        module.redraw()
        noises.append(module.noise)
    noises = torch.stack(noises)
    assert torch.unique(noises).numel() == noises.numel()


def test_steps_change_nothing_that_is_saved_but_their_count_and_nothing_in_eval():
    module = Noise(1)
    module.weight.requires_grad_(False)
    before, expected = saved(module), module.eval()()
    module.weight.requires_grad_(True)
    steps(module.train(), 4)
    for name, value in saved(module).items():
        assert torch.equal(value, before[name]) == (name != "step_count"), name
    assert torch.equal(module.eval()(), expected)
    assert not torch.equal(module.train()(), expected)


def test_without_redraw_every_nothing_changes_and_nothing_is_counted():
    module = Noise()
    assert set(module.state_dict()) == {"weight", "noise"}
    assert changes(steps(module, 5)) == [False] * 4
    assert module()._backward_hooks is None
    assert module._steps is None


def test_in_eval_and_inference_mode_nothing_is_counted():
    module = Noise(1)
    steps(module, 2)
    before = saved(module)
    steps(module.eval(), 3)
    module.train()
    with torch.inference_mode():
        outs = [module() for _ in range(3)]
    assert torch.equal(outs[0], (module.weight * module._drawn("noise")).sin())
    for name, value in saved(module).items():
        assert torch.equal(value, before[name]), name


def test_a_draw_made_in_inference_mode_serves_training():
    module = Noise(1)
    steps(module, 2)
    module._renewed = None
    with torch.inference_mode():
        module()
    assert not module._drawn("noise").is_inference()
    steps(module, 1)


def test_forwards_without_a_backward_between_them_are_one_step():
    module = Noise(1)
    with torch.no_grad():
        module()
    first, second = module(), module()
    assert torch.equal(first, second)
    (first.sum() + second.sum()).backward()
    assert int(module.step_count) == 1
    dropped = module()
    assert torch.equal(module(), dropped)  # the batch of `dropped` was skipped
    assert int(module.step_count) == 2
    module().sum().backward()
    module()
    assert int(module.step_count) == 3


def test_several_backwards_in_a_row_are_one_end():
    module = Noise(1)
    one, two = module().sum(), module().sum()
    one.backward(retain_graph=True)
    two.backward()
    late = module().sum()  # a new step
    one.backward()  # of the step before: no end of this one
    module()
    assert int(module.step_count) == 2
    late.backward()
    module()
    assert int(module.step_count) == 3


def test_a_graph_made_for_second_derivatives_does_not_end_its_step():
    module, x = Noise(1), torch.tensor(0.3, requires_grad=True)
    forces = []
    for _ in range(2):  # two batches in one loss
        forces += torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    assert int(module.step_count) == 1
    sum(force.square() for force in forces).backward()
    module(x)
    assert int(module.step_count) == 2


def test_a_loss_of_forces_alone_ends_the_step():
    model, x = encoder(1), torch.randn(5, 8, generator=seeded())
    positions = torch.randn(5, 3, generator=seeded(1), requires_grad=True)
    for _ in range(3):
        energy = model(x, positions).square().sum()
        (force,) = torch.autograd.grad(energy, positions, create_graph=True)
        force.square().sum().backward()
    counts = {
        int(m.step_count) for m in model.modules() if isinstance(m, Redrawn) if m.redraw_every
    }
    assert counts == {3}


def test_an_earlier_graph_stays_valid():
    module = Noise(1)
    noise = module.noise
    early = module().sum()
    module().sum().backward()
    late = module().sum()
    module.redraw()
    module.weight.grad = None
    early.backward()
    torch.testing.assert_close(module.weight.grad, (noise * noise.cos()).sum())
    late.backward()


def gradients(build, run, reentrant, rounds=3):
    """Of `rounds` steps, with checkpoints (True, False) or without (None)."""

    def call(module, *inputs):
        if reentrant is None:
            return module(*inputs)
        return checkpoint(module, *inputs, use_reentrant=reentrant)

    module, found = build(), []
    for step in range(rounds):
        x = torch.randn(5, 8, generator=seeded(step), requires_grad=True)
        module.zero_grad()
        run(module, x, call)
        found.append([x.grad, *(p.grad for p in module.parameters())])
    return found


class Twice(Noise):
    """A stack that applies one module twice."""

    def forward(self, x):
        x = x[..., :4]
        return super().forward(super().forward(x))


def alone(module, x, call):
    call(module, x[:, :4]).sum().backward()


def nested(module, x, call):
    """f(f(x)): the inner one is recomputed after the outer one's."""
    call(module, call(module, x[:, :4])).sum().backward()


def two_batches(module, x, call):
    (call(module, x[:, :4]).sum() + call(module, x[:, 4:]).square().sum()).backward()


def two_losses(module, x, call):
    one, two = call(module, x[:, :4]).sum(), call(module, x[:, 4:]).square().sum()
    one.backward()
    two.backward()


RUNS = {
    "alone": (lambda: Noise(1), alone),
    "nested": (lambda: Noise(1), nested),
    "inside": (lambda: Twice(1), lambda m, x, call: call(m, x).sum().backward()),
    "two batches": (lambda: Noise(1), two_batches),
    "two losses": (lambda: Noise(2), two_losses),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_those_without_checkpointing(name, reentrant):
    build, run = RUNS[name]
    truth = gradients(build, run, None)
    for got, want in zip(gradients(build, run, reentrant), truth, strict=True):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    module = build()
    gradients(lambda: module, run, reentrant)
    assert int(module.step_count) == 3


def position_encoding(redraw_every=1, learned=True):
    spectrum = GaussianSpectrum(2, 3, generator=seeded(1)).requires_grad_(learned)
    frequencies = GaussianFrequencies(
        5, learned_sigma=False, redraw_every=redraw_every, generator=seeded(2)
    )
    return FourierRPE(spectrum, frequencies)


def encoder(recycles=2):
    """Two blocks with one feature map in common, and one RPE."""
    generator, blocks = seeded(3), []
    for _ in range(2):
        attention = FLTAttention(
            8,
            2,
            position_dim=10,
            num_features=6,
            generator=generator,
            **({"redraw_every": 1} if not blocks else {}),
        )
        if blocks:
            attention.feature_map = blocks[0].attention.feature_map
        blocks.append(FLTBlock(attention, 16))
    for parameter in itertools.chain(*(b.parameters() for b in blocks)):
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return FLTEncoder(blocks, position_encoding(), recycles)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recycled_encoder_with_shared_parts(reentrant):
    positions = torch.randn(5, 3, generator=seeded())

    def run(module, x, call):
        (
            call(module, x, positions).square().sum() + call(module, 2 * x, positions).sum()
        ).backward()

    def build():
        model = encoder()
        built.append(model)
        return model

    built = []
    truth = gradients(build, run, None)
    got = gradients(build, run, reentrant)
    for mine, want in zip(got, truth, strict=True):
        for one, other in zip(mine, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not torch.equal(truth[0][1], truth[1][1])
    for model in built:
        counts = {int(m.step_count) for m in model.modules() if isinstance(m, Redrawn)}
        assert counts == {3}


def test_checkpoints_around_each_block_of_a_recycled_encoder(monkeypatch):
    positions = torch.randn(5, 3, generator=seeded())

    def run(module, x, call):
        module(x, positions).square().sum().backward()

    truth = gradients(encoder, run, None)
    forward = FLTBlock.forward

    def saving(self, *args, **settings):
        return checkpoint(forward, self, *args, use_reentrant=False, **settings)

    monkeypatch.setattr(FLTBlock, "forward", saving)
    for mine, want in zip(gradients(encoder, run, None), truth, strict=True):
        for one, other in zip(mine, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_recomputing_in_a_later_step_is_refused():
    module = Noise(1)

    def step():
        return checkpoint(module, torch.ones((), requires_grad=True), use_reentrant=False).sum()

    early, other = step(), step()
    other.backward()
    step()
    with pytest.raises(RuntimeError, match="of training step 0 is recomputed in step 1"):
        early.backward()
    module = Noise(2)  # the next step has the same draw
    early, other = step(), step()
    other.backward()
    step()
    early.backward()


def test_layers_that_share_an_rpe_share_its_draw():
    rpe, x = position_encoding(), torch.randn(5, 8, generator=seeded())
    layers = [FLTAttention(8, 2, rpe=rpe, generator=seeded(k)) for k in range(3)]
    positions, seen = torch.randn(5, 3, generator=seeded(1)), []
    rpe.register_forward_hook(lambda module, args, out: seen.append(out.basis))
    for _ in range(3):
        out = x
        for layer in layers:
            out = layer(out, positions)
        out.sum().backward()
    assert int(rpe.frequencies.step_count) == 3
    same = [torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    assert same == [True, True, False, True, True, False, True, True]


def test_a_frozen_spectrum_in_a_layer_that_learns_is_redrawn_too():
    rpe, x = position_encoding(learned=False), torch.randn(5, 8, generator=seeded())
    layer, positions = FLTAttention(8, 2, rpe=rpe), torch.randn(5, 3, generator=seeded(1))
    for _ in range(3):
        layer(x, positions).sum().backward()
    assert int(rpe.frequencies.step_count) == 3
    assert not rpe(positions, redraw=False).key.requires_grad
    assert not rpe.eval()(positions).key.requires_grad


def test_a_checkpoint_goes_on_where_it_was():
    module = Noise(3)
    steps(module, 4)
    other = Noise(3, seed=9)
    steps(other, 2)
    other()
    other.load_state_dict(module.state_dict())
    for mine, its in zip(steps(module, 8), steps(other, 8), strict=True):
        assert torch.equal(mine, its)
    assert torch.equal(module.eval()(), other.eval()())


NEW_PROCESS = """
import json, sys, torch
from flt_mol.nn import FourierRPE, GaussianFrequencies, GaussianSpectrum
frequencies = GaussianFrequencies(5, learned_sigma=False, redraw_every=2)
rpe = FourierRPE(GaussianSpectrum(2, 3), frequencies)
rpe.load_state_dict(torch.load(sys.argv[1], weights_only=True))
torch.manual_seed(int(sys.argv[2]))
positions, out = torch.arange(6.0).view(2, 3) / 7, []
for _ in range(5):
    features = rpe(positions)
    features.key.sum().backward()
    out.append(features.basis.tolist())
out.append(rpe.eval()(positions).basis.tolist())
print(json.dumps(out))
"""


def test_a_new_process_continues_the_sequence(tmp_path):
    rpe, positions, expected = position_encoding(2), torch.arange(6.0).view(2, 3) / 7, []
    for k in range(8):
        if k == 3:
            torch.save(rpe.state_dict(), tmp_path / "weights.pt")
        features = rpe(positions)
        features.key.sum().backward()
        expected.append(features.basis.tolist())
    expected.append(rpe.eval()(positions).basis.tolist())
    command = [sys.executable, "-c", NEW_PROCESS, str(tmp_path / "weights.pt"), "5"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == expected[3:]
    assert expected[3] != expected[4] == expected[5]
    assert expected[8] == expected[0]


def pickled(module):
    return pickle.loads(pickle.dumps(module))


def torch_saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, torch_saved])
@pytest.mark.parametrize("middle", [False, True])
def test_a_copy_goes_on_as_the_original_does(copied, middle):
    module = Noise(2)
    steps(module, 4)
    if middle:
        module()
    other = copied(module)
    assert other._renewed is None
    torch.manual_seed(1)
    for mine, its in zip(steps(module, 5), steps(other, 5), strict=True):
        assert torch.equal(mine, its)


def test_replicas_stay_equal_whatever_else_they_draw_and_whoever_sends_buffers():
    replica = Noise(2)
    other = copy.deepcopy(replica)
    torch.manual_seed(0)
    one, two = [], []
    for _ in range(7):
        with torch.no_grad():  # what DistributedDataParallel does before each forward
            for mine, its in zip(replica.buffers(), other.buffers(), strict=True):
                its.copy_(mine)
        one += steps(replica, 1)
        torch.rand(5)
        two += steps(other, 1)
    assert all(map(torch.equal, one, two))
    assert changes(one) == changes(steps(Noise(2), 7))


def test_a_replica_that_missed_steps_follows_the_buffers_it_is_sent():
    replica, other = Noise(1), Noise(1)
    steps(replica, 5)
    steps(other, 2)
    other.step_count.copy_(replica.step_count)
    assert torch.equal(steps(replica, 1)[0], steps(other, 1)[0])


def test_old_checkpoints_load_and_new_ones_load_where_nothing_is_redrawn():
    fixed, renewed = Noise(), Noise(1, seed=3)
    seed = renewed.redraw_seed.clone()
    renewed.load_state_dict(fixed.state_dict(), strict=True)
    assert torch.equal(renewed.noise, fixed.noise)
    assert torch.equal(renewed.redraw_seed, seed)
    steps(renewed, 3)
    parent, renewed_parent = torch.nn.Sequential(fixed), torch.nn.Sequential(renewed)
    parent.load_state_dict(renewed_parent.state_dict(), strict=True)
    assert torch.equal(fixed.noise, renewed.noise)
    assert set(fixed.state_dict()) == {"weight", "noise"}
    counted = renewed_parent.state_dict()
    counted["0.forward_count"] = counted.pop("0.step_count") + 6
    for module in (parent, renewed_parent):
        module.load_state_dict(counted, strict=True)
    assert int(renewed.step_count) == 9


@pytest.mark.parametrize("change", ["half", "double", "bfloat16"])
def test_draws_and_counters_survive_changes_of_dtype(change):
    module = Noise(2, seed=1)
    draw = steps(module, 3)[-1]
    expected = {name: getattr(module, name).clone() for name in COUNTERS}
    getattr(module, change)()
    for name, value in expected.items():
        assert getattr(module, name).dtype == torch.int64
        assert torch.equal(getattr(module, name), value)
    dtype = module.weight.dtype
    assert torch.equal(module._drawn("noise"), draw.to(dtype))
    assert torch.equal(module.float()._drawn("noise"), draw)
    module.to(dtype).redraw()
    assert module.noise.dtype == dtype
    assert int(expected["redraw_seed"]) > 2**53  # what a float would have rounded


def test_a_module_without_storage_is_filled_by_a_checkpoint():
    module = Noise(1)
    steps(module, 3)
    with torch.device("meta"):
        other = Noise(1, seed=5)
    other.to_empty(device="cpu").load_state_dict(module.state_dict())
    for mine, its in zip(steps(module, 3), steps(other, 3), strict=True):
        assert torch.equal(mine, its)


def test_an_explicit_redraw_works_in_any_mode_and_changes_no_later_draw():
    module, untouched = Noise(5).eval(), Noise(5)
    first = module.noise
    with torch.inference_mode():
        module.redraw()
    second = module.noise
    assert not second.is_inference()
    assert not torch.equal(first, second)
    assert torch.equal(module.train()._drawn("noise"), second)
    assert torch.equal(steps(module, 6)[-1], steps(untouched, 6)[-1])
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
    steps(Noise(1), 4)
    frequencies = GaussianFrequencies(
        4, learned_sigma=False, sampling="sobol", redraw_every=1, generator=seeded()
    )
    rpe = FourierRPE(GaussianSpectrum(1, 1, generator=seeded()), frequencies)
    for _ in range(3):
        rpe(torch.zeros(2, 3)).key.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("every", [0, -1, 2.5, float("nan"), "two"])
def test_what_is_no_number_of_steps_is_refused(every):
    with pytest.raises(ValueError, match=f"redraw_every is {every}"):
        Noise(every)


def test_what_draws_nothing_says_so():
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
    expected = rpe.eval()(positions).basis
    first = rpe.train()(positions)
    first.key.sum().backward()
    assert torch.equal(rpe(positions, redraw=False).basis, first.basis)
    rpe.sampled_mask(positions)
    rpe.ratio()
    assert int(rpe.frequencies.step_count) == 1
    second = rpe(positions)
    assert not torch.equal(second.basis, first.basis)
    assert torch.equal(rpe(positions, redraw=False).basis, second.basis)
    assert torch.equal(rpe.eval()(positions).basis, expected)


def test_learning_a_width_and_redrawing_exclude_each_other():
    with pytest.raises(ValueError, match="learned_sigma=False"):
        GaussianFrequencies(4, redraw_every=10)
    with pytest.raises(ValueError, match="learned_mean=False"):
        GaussianFrequencies(4, learned_sigma=False, learned_mean=True, redraw_every=10)
    GaussianFrequencies(4, learned_sigma=False, redraw_every=10)


# Torch's own, of every graph break with results before it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
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
        for module in (compiled, twin):
            module(positions).key.sum().backward()
        torch.testing.assert_close(
            renewed(positions, redraw=False).basis, twin(positions, redraw=False).basis
        )
    assert int(renewed.frequencies.step_count) == 5
    expected = renewed.eval()(positions).basis
    torch.testing.assert_close(compiled(positions).basis, expected)
