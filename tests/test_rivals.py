"""The rivals of the accuracy tables: PaiNN against its formulas atom by atom, rotations of all."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from flt_mol.structures import Structures

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))


def system(seed=0, turned=None, atoms=7, size=4.5):
    generator = np.random.default_rng(seed)
    positions, cell = generator.uniform(0, size, (atoms, 3)), np.eye(3) * size
    if turned is not None:
        positions, cell = positions @ turned.T, cell @ turned.T
    numbers, tags = generator.choice([1, 6, 8], atoms), generator.integers(0, 3, atoms)
    return Structures.single(
        numbers, positions, cell=cell, pbc=[True, True, False], tags=tags, dtype=torch.float64
    )


def painn_by_loops(model, one):
    """Equations 7 to 10 of Schütt et al., one pair and one atom after the other."""
    x = list(model.embedding(one.atomic_numbers, one.tags))
    vectors = [x[0].new_zeros(3, model.width) for _ in x]
    cutoff, cell = model.cutoff, one.cell[0]
    for block in model.blocks:
        add = [torch.zeros_like(row) for row in x]
        turn = [torch.zeros_like(row) for row in vectors]
        for i in range(len(x)):
            for j in range(len(x)):
                for a in (-2, -1, 0, 1, 2):
                    for b in (-2, -1, 0, 1, 2):
                        there = one.positions[j] + a * cell[0] + b * cell[1] - one.positions[i]
                        distance = there.norm()
                        if not 0 < distance < cutoff:
                            continue
                        waves = [
                            torch.sin(n * math.pi * distance / cutoff) / distance
                            for n in range(1, len(model.frequencies) + 1)
                        ]
                        window = 0.5 * (torch.cos(math.pi * distance / cutoff) + 1)
                        filters = block.filters(torch.stack(waves)) * window
                        scalar, old, new = (block.message(x[j]) * filters).chunk(3)
                        add[i] = add[i] + scalar
                        turn[i] = turn[i] + vectors[j] * old + torch.outer(there / distance, new)
        x = [row + more for row, more in zip(x, add, strict=True)]
        vectors = [row + more for row, more in zip(vectors, turn, strict=True)]
        for i in range(len(x)):
            left, right = block.mix(vectors[i]).chunk(2, dim=-1)
            length = torch.sqrt((right**2).sum(0) + 1e-8)
            kept, dot, free = block.update(torch.cat([x[i], length])).chunk(3)
            x[i] = x[i] + free + dot * (left * right).sum(0)
            vectors[i] = vectors[i] + kept * left
    weights, each = model.head.tag_weight[one.tags], model.head.atom_energy(torch.stack(x))
    return (weights * each).sum(0)


def test_painn_is_its_equations_with_gradients():
    rivals = importlib.import_module("common.rivals")
    torch.manual_seed(0)
    model = rivals.PaiNN(width=6, cutoff=4.0, num_blocks=2, num_basis=5).double()
    one = system()
    results = []
    for name in ("fast", "loops"):
        if name == "fast":
            energy = torch.stack(list(model(one).values()))[:, 0]
        else:
            energy = painn_by_loops(model, one)
        loss = (energy * torch.tensor([1.0, 2.0])).sum()
        gradients = torch.autograd.grad(loss, list(model.blocks.parameters()))
        results.append([energy, *gradients])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast.double(), slow.double(), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # of e3nn and its compiler
@pytest.mark.parametrize("name", ["painn", "schnet", "visnet", "mace"])
def test_energies_do_not_turn_with_the_system(name):
    rivals = importlib.import_module("common.rivals")
    torch.manual_seed(1)
    model = (mace() if name == "mace" else rivals.RIVALS[name](width=8)).eval()
    turned = Rotation.random(random_state=3).as_matrix()
    first, second = model(system(5))["energy"], model(system(5, turned))["energy"]
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
    assert abs(first - model(system(6))["energy"]) > 1e-4


def mace(**options):
    pytest.importorskip("mace")
    rivals = importlib.import_module("common.rivals")
    return rivals.MACE(width=4, elements=["O", "H", "C"], neighbors=5.0, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"vectors": False, "correlation": 2}])
def test_maces_features_are_those_of_the_package(options):
    torch.manual_seed(0)
    model, one = mace(**options), system().with_pairs(5.0)
    model.head = seen = Recorded()
    model(one)
    net, pairs = model.net, one.pairs
    kinds = (one.atomic_numbers[:, None] == torch.tensor([8, 1, 6])).float()
    net.node_embedding = Recorded(model.embedding(one.atomic_numbers, one.tags))
    net.readouts = torch.nn.ModuleList()
    data = {
        "positions": one.positions.float(), "cell": one.cell[0].float(), "node_attrs": kinds,
        "edge_index": torch.stack([pairs.index_j, pairs.index_i]), "ptr": one.ptr,
        "unit_shifts": -pairs.shift.float(), "batch": one.system,
        "shifts": -pairs.shift.float() @ one.cell[0].float(),
    }  # fmt: skip
    expected = net(data, compute_force=False)["node_feats"][:, -model.width :]
    torch.testing.assert_close(seen.given, expected, rtol=1e-4, atol=1e-5)


class Recorded(torch.nn.Module):
    """Keeps its first input; returns what it was made with, or zeros (1, 2)."""

    def __init__(self, result=None):
        super().__init__()
        self.result = torch.zeros(1, 2) if result is None else result

    def forward(self, given, *_):
        self.given = given
        return self.result


def test_a_row_whose_package_is_not_installed_is_left_out(monkeypatch, tmp_path, capsys):
    run = importlib.import_module("accuracy.run")
    monkeypatch.setattr("accuracy.models.find_spec", lambda name: None)
    results = ["--results", str(tmp_path / "none.jsonl")]
    monkeypatch.setattr("sys.argv", ["run.py", "--rows", "mace", *results])
    run.main()
    assert "mace" in capsys.readouterr().out.splitlines()[0]
    assert not any(tmp_path.iterdir())


def test_painns_vectors_turn_with_the_system():
    block = importlib.import_module("common.rivals").PaiNNBlock(4, 3).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    vectors = torch.randn(5, 3, 4, generator=generator, dtype=torch.float64)
    edges = torch.randint(5, (2, 9), generator=generator)
    units, waves = (torch.randn(9, 3, generator=generator, dtype=torch.float64) for _ in "uw")
    turned = torch.from_numpy(Rotation.random(random_state=0).as_matrix())
    window = torch.ones(9, 1, dtype=torch.float64)
    scalars, out = block(x, vectors, edges, units, waves, window)
    same, other = block(x, turned @ vectors, edges, units @ turned.T, waves, window)
    torch.testing.assert_close(same, scalars)
    torch.testing.assert_close(other, turned @ out)


def test_epochs_of_equal_time_follow_the_latest_times_that_have_both_rows(tmp_path):
    run = importlib.import_module("accuracy.run")
    results, settings = run.Results(tmp_path / "results.jsonl"), run.Settings("joint")
    line = {"targets": "joint", "data": "d", "steps_per_epoch": 3}
    results.append({**line, "times": {"ours": [1.0, 2.0, 3.0], "painn": [4.0, 4.0, 6.0]}})
    results.append({**line, "times": {"ours": [1.0], "visnet": [4.0]}})
    results.append({**line, "times": {"ours": [1.0], "painn": [9.0]}, "targets": "relaxed"})
    assert run.share_of(results, "painn", settings, "d") == 0.5
    assert run.share_of(results, "visnet", settings, "d") == 0.25
    with pytest.raises(SystemExit, match="schnet"):
        run.share_of(results, "schnet", settings, "d")


def test_a_training_may_last_a_fraction_of_an_epoch():
    loop = importlib.import_module("common.loop")
    rivals = importlib.import_module("common.rivals")
    systems = [system(seed) for seed in range(4)]
    systems = [
        type(one)(**{**vars(one), "energy": torch.tensor([float(k)], dtype=torch.float64)})
        for k, one in enumerate(systems)
    ]
    settings, rates = loop.Settings("relaxed", epochs=2.5, batch_size=1), []
    step = loop.Training.step

    def recorded(self, batch):
        loss = step(self, batch)
        rates.append(self.optimizer.param_groups[0]["lr"])
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Training, "step", recorded)
        loop.train(lambda: rivals.PaiNN(width=4).double(), systems, settings, seed=0)
    assert len(rates) == 10
    assert rates[-1] < 0.2 * max(rates) <= 0.2 * settings.learning_rate
