"""What every named model claims holds at 1e-4 eV, on slabs with adsorbates, at a narrow width."""

import functools

import pytest
import torch
import yaml
from ase.build import add_adsorbate, bcc110, fcc111, fcc211, molecule

from flt_mol import Structures, testing
from flt_mol.files import shipped_folder
from flt_mol.models import EnergyConfig, EnergyModel
from flt_mol.training.config import LossConfig
from flt_mol.training.losses import training_loss

FOLDERS = sorted(file.parent for file in shipped_folder("models").glob("*/model.yaml"))
every_model = pytest.mark.parametrize("name", [folder.name for folder in FOLDERS])

NARROW = {"embed_dim": 32, "num_heads": 2, "num_layers": 2, "ffn_dim": 32, "num_features": 16}
PARTS = {
    "rpe": {"num_terms": 4, "num_frequencies": 6},
    "spectral": {"num_heads": 2},
    "pairs": {"num_basis": 12, "vectors": 4, "filter_vectors": 4},
    "images": {"num_basis": 8},
}
TOLERANCE = 1e-4  # eV


def narrow(values):
    """The same model with fewer layers, channels and functions; nothing else changes."""
    values = {
        key: min(value, NARROW.get(key, value)) if key in NARROW else value
        for key, value in values.items()
    }
    for part, sizes in PARTS.items():
        if values[part] is not None:
            smaller = {key: min(size, values[part][key]) for key, size in sizes.items()}
            values[part] = {**values[part], **smaller}
    return EnergyConfig.from_dict(values)


@functools.cache
def built(name):
    values = yaml.safe_load((shipped_folder("models") / name / "model.yaml").read_text("utf-8"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = EnergyModel(narrow(values)).eval()
    # Mean and spread of adsorption energies, eV.
    model.normalizer.fit(torch.tensor([-2.5, -0.5, 1.5]))
    return model


def slab(sid, atoms, adsorbate, height, whole):
    """A slab with its lower half fixed; `whole` cells repeat across the vacuum, too, as in OC20."""
    atoms = atoms.copy()
    layers = atoms.get_tags()
    add_adsorbate(atoms, molecule(adsorbate), height, position=(1.1, 0.7))
    atoms.center(vacuum=7.0, axis=2)
    count = len(layers)
    tags = torch.full((len(atoms),), 2)
    tags[:count] = torch.as_tensor(layers == 1).long()
    relaxed = torch.as_tensor(atoms.positions) + 0.1 * torch.randn(
        len(atoms), 3, generator=torch.Generator().manual_seed(sid), dtype=torch.float64
    )
    fixed = torch.zeros(len(atoms), dtype=torch.bool)
    fixed[:count] = torch.as_tensor(layers > 2)
    return Structures.single(
        atoms.numbers,
        atoms.positions,
        cell=atoms.cell.array,
        pbc=[True, True, whole],
        tags=tags,
        fixed=fixed,
        sid=sid,
        energy=-0.7 * sid,
        positions_relaxed=torch.where(fixed[:, None], torch.as_tensor(atoms.positions), relaxed),
    )


@functools.cache
def slabs():
    return Structures.cat(
        [
            slab(0, fcc111("Cu", (2, 2, 4)), "CO", 1.9, False),
            slab(1, fcc111("Pt", (3, 3, 3)), "H2O", 2.3, True),
            slab(2, fcc211("Ag", (3, 2, 3)), "NH3", 2.2, True),
            slab(3, bcc110("W", (2, 3, 3), orthogonal=False), "OH", 2.0, False),
        ]
    )


def tolerance(model):
    """Checks allow tolerance · max(1 eV, |E|); this makes it 1e-4 eV for the largest."""
    with torch.no_grad():
        largest = float(model(slabs())["energy"].abs().max())
    assert largest > 0.05
    return TOLERANCE / max(1.0, largest)


def test_there_are_models():
    assert len(FOLDERS) >= 2


@every_model
def test_order_place_and_company_do_not_matter(name):
    model, structures = built(name), slabs()
    settings = {"tolerance": tolerance(model)}
    testing.check_permutation(model, structures, **settings)
    testing.check_translation(model, structures, **settings)
    testing.check_batch_equals_alone(model, structures, larger=2, **settings)
    testing.check_empty_and_single_atom(model, structures, **settings)


@every_model
def test_rotations(name):
    model, structures = built(name), slabs()
    if model.rotation_invariant:
        testing.check_rotation(model, structures, tolerance=tolerance(model))
        if "displacement" in model.config.outputs:
            testing.check_displacement_equivariance(model, structures)
    else:
        with pytest.raises(AssertionError, match="when it was rotated"):
            testing.check_rotation(model, structures, tolerance=tolerance(model))


@every_model
def test_lattice_shifts(name):
    model, structures = built(name), slabs()
    if model.sees_images or model.config.rpe is None:
        testing.check_periodic_images(model, structures, tolerance=tolerance(model))
    else:
        with pytest.raises(AssertionError, match="moved by lattice vectors"):
            testing.check_periodic_images(model, structures, tolerance=tolerance(model))


@every_model
def test_supercells(name):
    """What is claimed of them holds, and where nothing is claimed it does not."""
    model, structures = built(name), slabs()
    settings = {
        "tolerance": tolerance(model),
        "repeats": [(3, 2, 1)],
        "extensive": model.config.readout != "mean",
    }
    if model.supercell_consistent:
        testing.check_supercell(model, structures, **settings)
    else:
        with pytest.raises(AssertionError, match="per cell from one cell to 3×2×1 of them"):
            testing.check_supercell(model, structures, **settings)


@every_model
def test_a_training_step_under_bf16_autocast(name):
    source, structures = built(name), slabs()
    with torch.random.fork_rng(devices=[]):
        model = EnergyModel(source.config)
    model.load_state_dict(source.state_dict())
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)
    normalizers = {"energy": model.normalizer}
    losses = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", torch.bfloat16):
            outputs = model(structures)
            loss = training_loss(outputs, structures, 0.0, LossConfig(), normalizers).total
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        for key, p in model.named_parameters():
            assert p.grad is not None, key
            assert p.grad.isfinite().all(), key
        optimizer.step()
    assert torch.tensor(losses).isfinite().all()
    assert losses[1] < losses[0]
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["flt-small", "flt-base"])
def test_four_passes_at_full_width_keep_features_in_bounds(name):
    """Before any training: what grows with every block and pass ends in NaN."""
    values = yaml.safe_load((shipped_folder("models") / name / "model.yaml").read_text("utf-8"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = EnergyModel(EnergyConfig.from_dict({**values, "recycles": 4})).eval()
    with torch.no_grad():
        out = model(slabs(), embeddings=True)
    assert out["atom_embeddings"].abs().max() < 200
    assert out["energy_passes"].abs().max() < 200
