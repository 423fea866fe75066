import ase.io
import numpy as np
import pytest
import torch
from ase.calculators.emt import EMT

from flt_mol import Structures
from flt_mol.cli import main
from flt_mol.data import to_ase
from flt_mol.data.recipes import recipe
from flt_mol.prediction.relaxation import OPTIMIZERS, largest_force, relax_structures


class Wells(torch.nn.Module):
    """½ k Σ ‖r − (1, 1, 1) z‖², eV: each atom has its minimum at a point of its element."""

    def forward(self, structures):
        z = structures.atomic_numbers[:, None]
        away = structures.positions - z.to(structures.positions.dtype)
        energy = torch.zeros(len(structures)).index_add(0, structures.system, away.square().sum(1))
        return {"energy": energy, "forces": -2 * away}


class NoForces(Wells):
    def forward(self, structures):
        return {"energy": super().forward(structures)["energy"]}


def systems():
    """The second has further to go, and an atom that is fixed."""
    cell = {"cell": 20 * np.eye(3), "pbc": True}
    near = Structures.single([1, 2], [[1.1, 1, 1], [2, 2, 2.2]], tags=[1, 2], sid=5, **cell)
    positions = [[3.0, 1, 1], [2, 2, 6], [9, 9, 9]]
    fixed = {"tags": [0, 1, 2], "fixed": [1, 0, 0]}
    return [near, Structures.single([1, 2, 3], positions, sid="far", **fixed, **cell)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_free_atoms_reach_the_minimum(optimizer):
    near, far = relax_structures(Wells(), systems(), optimizer=optimizer, fmax=1e-3, steps=500)
    assert (near[0].info["sid"], far[-1].info["sid"]) == (5, "far")
    assert 1 < len(near) < len(far)
    np.testing.assert_allclose(near[-1].positions, [[1] * 3, [2] * 3], atol=1e-3)
    expected = [[3, 1, 1], [2] * 3, [3] * 3]
    np.testing.assert_allclose(far[-1].positions, expected, atol=1e-3)
    assert far[-1].get_potential_energy() == pytest.approx(4.0, abs=1e-5)  # of the fixed atom
    assert far[0].get_potential_energy() == pytest.approx(4 + 16 + 108, rel=1e-6)
    assert largest_force(far[-1]) < 1e-3 <= largest_force(far[-2])


def test_a_batch_relaxes_as_each_alone():
    together = relax_structures(Wells(), [Structures.cat(systems())])
    alone = [relax_structures(Wells(), [system])[0] for system in systems()]
    for one, other in zip(together, alone, strict=True):
        assert len(one) == len(other)
        for frame, again in zip(one, other, strict=True):
            assert np.array_equal(frame.positions, again.positions)
            assert frame.get_potential_energy() == again.get_potential_energy()


@pytest.mark.parametrize("suffix", [".traj", ".extxyz"])
@pytest.mark.parametrize("last", [False, True])
def test_the_trajectory(suffix, last, tmp_path):
    done = []
    found = relax_structures(
        Wells(), systems(), tmp_path / f"a{suffix}", batch_size=1, last=last, progress=done.append
    )
    assert done == [1, 2]
    frames = ase.io.read(tmp_path / f"a{suffix}", ":")
    wanted = [frame for one in found for frame in (one[-1:] if last else one)]
    assert [frame.info["step"] for frame in frames] == [frame.info["step"] for frame in wanted]
    assert [frame.info["sid"] for frame in frames] == [frame.info["sid"] for frame in wanted]
    for frame, other in zip(frames, wanted, strict=True):
        np.testing.assert_allclose(frame.positions, other.positions, atol=1e-7)
        np.testing.assert_allclose(frame.get_forces(), other.get_forces(), atol=1e-7)
        assert frame.get_potential_energy() == pytest.approx(other.get_potential_energy())
    assert frames[-1].constraints
    assert list(tmp_path.iterdir()) == [tmp_path / f"a{suffix}"]


def test_too_few_steps():
    (_, far) = relax_structures(Wells(), systems(), steps=2)
    assert [frame.info["step"] for frame in far] == [0, 1, 2]
    assert largest_force(far[-1]) > 0.05


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no forces"):
        relax_structures(NoForces(), systems(), tmp_path / "a.traj")
    with pytest.raises(ValueError, match="adam"):
        relax_structures(Wells(), systems(), optimizer="adam")
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path, capsys):
    system = recipe("emt_adsorption").open("val_ood_cat")[0]
    ase.io.write(tmp_path / "a.traj", [to_ase(system)])
    output = tmp_path / "out.traj"
    assert main(["relax", "emt-forces", str(tmp_path / "a.traj"), "-o", str(output)]) == 0
    line, *_ = capsys.readouterr().out.splitlines()
    assert line.split()[0] == str(system.sid[0])
    assert "not converged" not in line
    first, *_, last = ase.io.read(output, ":")
    fixed = system.fixed.numpy()
    assert np.array_equal(first.positions[fixed], last.positions[fixed])
    assert np.linalg.norm(last.get_forces(), axis=1).max() < 0.05
    assert last.get_potential_energy() < first.get_potential_energy()
    energies = []
    for atoms in (first, last):
        atoms.calc = EMT()
        energies.append(atoms.get_potential_energy())
    assert energies[1] < energies[0]
    assert main(["relax", "flt-small", str(tmp_path / "a.traj")]) == 2
    assert "no forces" in capsys.readouterr().err
    assert main(["relax", "emt-forces", str(output), "-o", str(output)]) == 2
