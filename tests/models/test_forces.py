"""Forces and stress: derivatives of energies, in every kind of model, and theirs by weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc111, molecule
from ase.calculators.emt import EMT
from conftest import KINDS, small_model, small_pairs

from flt_mol import Structures
from flt_mol.data import from_ase
from flt_mol.models import EnergyConfig, EnergyModel
from flt_mol.models.forces import with_forces
from flt_mol.nn import spectral_filter
from flt_mol.structures import known_forces
from helpers import invariances as testing

OUTPUTS = ["energy", "forces"]
SEEING = {name: kind for name, kind in KINDS.items() if not name.startswith("performer")}
every_kind = pytest.mark.parametrize("changes", SEEING.values(), ids=SEEING.keys())
BOTH = KINDS["both filters"]


def model_of(changes):
    return small_model(**{**changes, "outputs": OUTPUTS}).double().eval()


def crystals(natoms=(5, 1, 9), **settings):
    return testing.random_structures(
        torch.Generator().manual_seed(1), natoms, dtype=torch.float64, **settings
    )


def along(structures, direction, model, step=1e-4):
    """−dE/dx of each system along a direction (N, 3), by differences."""
    with torch.no_grad():
        high, low = (
            model(replace(structures, positions=structures.positions + x * direction))["energy"]
            for x in (step, -step)
        )
    return (low - high) / (2 * step)


def per_system(structures, values):
    return values.new_zeros(len(structures)).index_add(0, structures.system, values)


@every_kind
def test_forces_are_slopes_of_the_energy(changes):
    model, structures = model_of(changes), crystals()
    forces = model(structures)["forces"]
    assert forces.abs().max() > 5e-4
    direction = torch.randn(forces.shape, generator=torch.Generator().manual_seed(0)).double()
    expected = along(structures, direction, model)
    found = per_system(structures, (forces * direction).sum(1))
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)
    total = torch.stack([per_system(structures, x) for x in forces.T])
    assert total.abs().max() < 1e-12  # translations


def opened():
    """A molecule, a slab with an open direction, one with vacuum, a wire, a crystal."""
    slab = fcc111("Pt", (2, 2, 2))
    add_adsorbate(slab, "O", 1.3, "fcc")
    with_vacuum = fcc111("Cu", (1, 2, 3), vacuum=9.0, periodic=True)
    ends = [[0, 0, 0], [1.3, 0.3, 1.5], [0.2, 1.9, 3], [1, 1, 4.2]]
    wire = Atoms("CuPtCuAu", ends, cell=[0, 0, 5.5], pbc=[0, 0, 1])
    batch = [molecule("CH3CH2OH"), slab, with_vacuum, wire, bulk("Cu", cubic=True)]
    generator = np.random.default_rng(0)
    for atoms in batch:
        moved = 0.1 * generator.standard_normal((len(atoms), 3))
        moved[atoms.positions[:, 2] < 0.1] = 0  # the lowest layer ends at one height
        atoms.positions += moved
        atoms.set_tags(0)
    found = Structures.cat([from_ase(atoms) for atoms in batch])
    return replace(found, positions=found.positions.double(), cell=found.cell.double())


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("name", ["spectral alone", "rpe", "both filters"])
def test_open_directions(name, prepared):
    """Also where virtual cells follow the atoms: all components against central differences."""
    model, structures = model_of(SEEING[name]), opened()
    found = model(model.prepare_batch(structures) if prepared else structures)["forces"]
    for place in range(int(structures.natoms.max())):
        rows = structures.ptr[:-1] + place
        rows = rows[rows < structures.ptr[1:]]
        for axis in range(3):
            direction = torch.zeros_like(found)
            direction[rows, axis] = 1.0
            expected = along(structures, direction, model)[structures.system[rows]]
            torch.testing.assert_close(found[rows, axis], expected, atol=1e-8, rtol=1e-5)


def test_stress_of_slabs():
    """Strain across a slab moves its atoms and leaves the vacuum of virtual cells alone."""
    model, slab = model_of(SEEING["spectral alone"]), opened()[2]
    strain = torch.tensor([[0.3, 0.5, 0], [0.5, -0.4, 0], [0, 0, 0.6]]).double()
    energies = []
    for step in (1e-4, -1e-4):
        stretch = torch.eye(3).double() + step * strain
        moved = slab.moved(slab.positions @ stretch)
        with torch.no_grad():
            energies.append(model(replace(moved, cell=slab.cell @ stretch))["energy"])
    expected = (energies[0] - energies[1]) / 2e-4 / slab.cell.det().abs()
    for given in (slab, model.prepare_batch(slab)):
        found = (model(given, stress=True)["stress"] * strain).sum((1, 2))
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-5)


@every_kind
def test_slopes_of_forces_by_weights(changes):
    """What training on forces follows: the mixed second derivatives."""
    model, structures = model_of(changes), crystals()
    generator = torch.Generator().manual_seed(5)
    direction = torch.randn(structures.positions.shape, generator=generator).double()
    weights = list(model.parameters())
    total = (model(structures)["forces"] * direction).sum()
    slopes = torch.autograd.grad(total, weights, allow_unused=True, materialize_grads=True)
    steps = [torch.randn(x.shape, generator=generator).double() for x in weights]
    found = sum((x * y).sum() for x, y in zip(slopes, steps, strict=True))
    totals = []
    with torch.no_grad():
        for step in (1e-5, -1e-5):
            for x, y in zip(weights, steps, strict=True):
                x.add_(y, alpha=step)
            totals.append((model(structures)["forces"] * direction).sum())
            for x, y in zip(weights, steps, strict=True):
                x.sub_(y, alpha=step)
    assert found.abs() > 1e-3
    torch.testing.assert_close(found, (totals[0] - totals[1]) / 2e-5, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["rpe", "spectral", "both filters", "gaussian images"])
@pytest.mark.parametrize("prepared", [True, False])
def test_stress_is_the_slope_by_strain(name, prepared):
    model, structures = model_of(SEEING[name]), crystals()
    if prepared:
        structures = model.prepare_batch(structures)
    out = model(structures, stress=True)
    torch.testing.assert_close(out["stress"], out["stress"].mT)
    strain = torch.tensor([[0.3, 0.5, -0.2], [0.5, -0.4, 0.1], [-0.2, 0.1, 0.6]]).double()
    energies = []
    for step in (1e-4, -1e-4):
        stretch = torch.eye(3).double() + step * strain
        moved = structures.moved(structures.positions @ stretch)
        with torch.no_grad():
            energies.append(model(replace(moved, cell=structures.cell @ stretch))["energy"])
    expected = (energies[0] - energies[1]) / 2e-4 / structures.cell.det().abs()
    assert expected.abs().max() > 1e-5
    torch.testing.assert_close((out["stress"] * strain).sum((1, 2)), expected, atol=1e-8, rtol=1e-5)


def test_signs_are_those_of_ase():
    """A crystal that is stretched pulls inwards: positive stress, as ASE's calculators have it."""

    def springs(structures):
        vectors = structures.pairs.vectors(structures.positions, structures.cell, structures.ptr)
        energy = (vectors.norm(dim=1) - 2.5).square().sum() / 4
        return {"energy": energy[None]}

    cell = 2.55 * 2**0.5 * torch.eye(3).double()
    points = torch.tensor([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]]).double() @ cell
    copper = Structures.single([29] * 4, points, cell=cell, pbc=True, dtype=torch.float64)
    out = with_forces(springs, copper.with_pairs(2.8), stress=True)
    assert out["stress"].diagonal(dim1=1, dim2=2).min() > 0
    # 12 springs an atom, each shared by two: V σ_xx = Σ_pairs (r − r₀) x²/r over both directions.
    expected = 48 * 0.05 * 2.55 / 3 / 2 / float(cell.det())
    assert out["stress"][0, 0, 0].item() == pytest.approx(expected, rel=1e-6)
    atoms = Atoms("Cu4", points.numpy(), cell=1.05 * cell.numpy(), pbc=True, calculator=EMT())
    atoms.set_cell(1.1 * cell.numpy(), scale_atoms=True)
    assert (np.asarray(atoms.get_stress())[:3] > 0).all()
    assert out["forces"].abs().max() < 1e-12


def test_systems_without_a_volume_have_no_stress():
    model = model_of(BOTH)
    water = Structures.single([8, 1, 1], [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
    out = model(water, stress=True)
    assert out["stress"].isnan().all()
    assert out["forces"].isfinite().all()
    assert "stress" not in model(water)


@pytest.mark.parametrize("name", ["both filters", "exact", "centred images, pair types"])
def test_rotations_turn_forces(name):
    model, structures = model_of(SEEING[name]), crystals()
    q = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(2)).double()).Q
    turned = replace(structures, positions=structures.positions @ q, cell=structures.cell @ q)
    expected, found = model(structures, stress=True), model(turned, stress=True)
    torch.testing.assert_close(found["forces"], expected["forces"] @ q, atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(found["stress"], q.T @ expected["stress"] @ q, atol=1e-7, rtol=1e-4)


def test_on_a_mesh(monkeypatch):
    """Large systems: the same forces, stress and slopes by weights."""
    structures, found = crystals((27,)), []
    weight = torch.randn(27, 3, generator=torch.Generator().manual_seed(0)).double()
    for limit in (spectral_filter.MAX_PRODUCTS, 0.0):
        monkeypatch.setattr("flt_mol.models.build.MAX_PRODUCTS", limit)
        model = model_of(KINDS["spectral"])
        assert bool(model.prepare_batch(structures).reciprocal.large) == (limit == 0)
        out = model(structures, stress=True)
        (out["forces"] * weight).sum().backward()
        slopes = [x.grad for x in model.parameters() if x.grad is not None]
        found.append([out["forces"], out["stress"], *slopes])
    assert len(found[0]) > 10
    for waves, mesh in zip(*found, strict=True):
        torch.testing.assert_close(mesh, waves, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    """Callers that predict: numbers without a graph, the same ones, also of their own tensors."""
    model, structures = model_of(BOTH), crystals()
    expected = model(structures)
    assert expected["forces"].requires_grad
    with mode():
        own = model.prepare_batch(Structures.cat([structures]))
        for out in (model(own), model(structures), model(own, embeddings=True)):
            assert not any(x.requires_grad for x in out.values())
            torch.testing.assert_close(out["forces"], expected["forces"].detach())
            torch.testing.assert_close(out["energy"], expected["energy"].detach())


def test_of_each_system_alone():
    model, structures = model_of(BOTH), crystals()
    alone = torch.cat([model(system)["forces"] for system in structures])
    torch.testing.assert_close(model(structures)["forces"], alone)


def test_compiled_models_go_on_without_the_compiler():
    model, structures = model_of(BOTH), crystals()
    expected = model(structures)["forces"]
    found = torch.compile(model, dynamic=True)(structures)["forces"]
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"rpe": None}, "outputs"),
        (
            {
                "pairs": small_pairs(),
                "outputs": [*OUTPUTS, "displacement"],
                "recycles": 2,
                "feedback": "positions",
            },
            "feedback",
        ),
    ],
)
def test_models_that_cannot_have_forces(settings, key):
    with pytest.raises(ValueError, match=key):
        EnergyConfig(**{"outputs": OUTPUTS, **settings})


def test_the_knowledge_survives_saving(tmp_path):
    from flt_mol import load_model
    from flt_mol.models.checkpoint import save_checkpoint
    from flt_mol.models.export import export_model

    model = small_model(outputs=OUTPUTS).eval()
    save_checkpoint(tmp_path / "a.ckpt", model, {})
    export_model(model, tmp_path / "exported")
    expected = model(crystals())["forces"]
    for path in (tmp_path / "a.ckpt", tmp_path / "exported"):
        again = load_model(path)
        assert isinstance(again, EnergyModel)
        assert again.config.outputs == OUTPUTS
        assert torch.equal(again(crystals())["forces"], expected)


def test_which_forces_count():
    structures = Structures.single(
        [1] * 3, torch.eye(3), fixed=[1, 0, 0], forces=[[0, 0, 0], [0, 0, 0], [0, 0, 0]]
    )
    assert known_forces(structures).tolist() == [False, True, True]
    forces = torch.tensor([[0, 0, 0], [0, torch.nan, 0], [0, 0, 0]])
    assert known_forces(replace(structures, forces=forces)).tolist() == [False, False, True]
    assert not known_forces(replace(structures, forces=None)).any()
