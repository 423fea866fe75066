"""Learned optimisers: their parts against references, and every row at a small size."""

import importlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))


def module(name):
    return importlib.import_module(name)


def seed(number):
    return torch.Generator().manual_seed(number)


def recurrence(layer, u):
    state, out = layer.begin(len(u)), []
    for row in u.unbind(1):
        y, state = layer(row, state)
        out.append(y)
    return torch.stack(out, 1)


def convolution(layer, u):
    """Σ_l K_l u_{t−l} + D u_t with K_l = 2 Re Σ_s c_s (e^{ΔA} − 1)/A e^{lΔA}, written out."""
    rate = torch.complex(-layer.log_decay.exp(), layer.turn)
    step = layer.log_step.exp()[:, None]
    weight = torch.view_as_complex(layer.read) * ((step * rate).exp() - 1) / rate
    length = u.shape[1]
    powers = torch.arange(length)[:, None, None] * step * rate
    kernel = 2 * (weight * powers.exp()).real.sum(-1)
    rows = [(kernel[: t + 1].flip(0) * u[:, : t + 1]).sum(1) for t in range(length)]
    return torch.stack(rows, 1) + layer.through * u


def test_s4d_is_its_convolution():
    layer = module("common.state_space").S4D(5, 4, generator=seed(0)).double()
    u = torch.randn(3, 17, 5, generator=seed(1)).double().requires_grad_()
    results = []
    for function in (recurrence, convolution):
        out = function(layer, u)
        results.append([out, *torch.autograd.grad(out.square().sum(), [u, *layer.parameters()])])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow)


def test_s4d_samples_the_differential_equation():
    """Of a constant input, x(t) = (e^{At} − 1)/A for any step."""
    layer = module("common.state_space").S4D(2, 1, generator=seed(0)).double()
    with torch.no_grad():
        layer.turn.fill_(2.0)
        layer.log_step.copy_(torch.tensor([0.1, 0.2]).double().log())
        layer.read.copy_(torch.tensor([0.5, 0.0]).expand(2, 1, 2))  # y = Re x
        layer.through.zero_()
        out = recurrence(layer, torch.ones(1, 20, 2).double())[0]
    torch.testing.assert_close(out[1::2][:10, 0], out[:10, 1])
    rate = complex(-0.5, 2.0)
    expected = ((math.e ** (rate * 4.0) - 1) / rate).real
    assert out[-1, 1].item() == pytest.approx(expected)


def test_functions_and_their_gradients():
    problem = module("optimizers.tasks").Rastrigin(3, (0.5, 1.5), 2.0, 4, seed(0))
    x = problem.start().requires_grad_()
    y = torch.einsum("kni,kij->knj", x - problem.centre, problem.rotation)
    value = problem.scale * y**2 + problem.amplitude * (1 - torch.cos(2 * math.pi * y))
    value = value.sum(-1) / 3
    found, gradient = problem.evaluate(x)
    torch.testing.assert_close(found, value.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(value.sum(), x)[0])
    least, _ = problem.evaluate(problem.centre)
    torch.testing.assert_close(least, torch.zeros(4, 1))


def test_nets_are_perceptrons():
    tasks = module("optimizers.tasks")
    images = tasks.load_images("synthetic").part(True, 4)
    problem = tasks.Nets(images, (6, 5), "relu", 2, seed(0), batch=900)
    x = problem.start() + 0.1 * torch.randn(2, 17 * 6 + 7 * 5 + 6 * 10, generator=seed(1))
    rows = torch.arange(900).expand(2, -1)
    for k in range(2):
        h, begin = images.pixels, 0
        for inputs, outputs in ((16, 6), (6, 5), (5, 10)):
            layer = x[k, begin : begin + (inputs + 1) * outputs].view(inputs + 1, outputs)
            h = h @ layer[:-1] + layer[-1]
            h, begin = (h.relu() if outputs < 10 else h), begin + layer.numel()
        expected = torch.nn.functional.cross_entropy(h, images.labels)
        torch.testing.assert_close(problem.losses(x, rows)[k], expected)


def test_adam_is_that_of_torch():
    problem = module("optimizers.tasks").Rastrigin(2, (1.0, 1.0), 1.0, 3, seed(0))
    learned = module("optimizers.learned")
    run = learned.Run(problem, learned.Adam(0.1))
    x = run.x.clone().requires_grad_()
    torchs = torch.optim.Adam([x], lr=0.1)
    for _ in range(20):
        x.grad = problem.evaluate(x)[1]
        torchs.step()
        run.advance()
    torch.testing.assert_close(run.x, x.detach())


def test_the_meta_gradient():
    """Of steps that do not depend on gradients it is that of the sum over steps of the bowl."""
    problem = module("optimizers.tasks").Rastrigin(2, (1.0, 1.0), 1.0, 3, seed(0))
    learned = module("optimizers.learned")
    drift = torch.tensor([0.05, -0.02], requires_grad=True)

    class Drift(learned.Adam):
        def __call__(self, x, values, gradient, state):
            return drift.expand_as(x), state

    run = learned.Run(problem, Drift(0.0))
    start = run.x
    (found,) = torch.autograd.grad(sum(run.advance() for _ in range(5)), drift)
    total = 0.0
    for step in range(1, 6):
        y = (start + step * drift - problem.centre) @ problem.rotation
        total = total + y.square().mean()
    torch.testing.assert_close(found, torch.autograd.grad(total, drift)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["FLT", "Performer", "LSTM"])
def test_populations_have_no_order_and_no_origin(kind):
    learned = module("optimizers.learned")
    torch.manual_seed(0)
    optimizer = learned.PopulationOptimizer(kind, 3)
    torch.nn.init.normal_(optimizer.core.head[-1].weight)
    problem = module("optimizers.tasks").Rastrigin(3, (1.0, 1.0), 1.0, 2, seed(0))
    x = problem.start()
    values, gradient = problem.evaluate(x)
    step, _ = optimizer(x, values, gradient, optimizer.begin(x))
    assert step.std() > 1e-3
    order = torch.randperm(16, generator=seed(1))
    for moved in (x[:, order], x[:, order] + torch.tensor([1.0, -2.0, 0.5])):
        found, _ = optimizer(moved, values[:, order], gradient[:, order], optimizer.begin(moved))
        torch.testing.assert_close(found, step[:, order], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_small_run(tmp_path):
    command = [sys.executable, "optimizers/run.py", "--smoke", "--results", tmp_path / "r.jsonl"]
    done = subprocess.run(command, cwd=EXPERIMENTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "FLT" in done.stdout
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 6 + 5 + 5
    assert len(list(tmp_path.glob("*.png"))) == 2
