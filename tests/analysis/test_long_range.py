import itertools
import math

import pytest
import torch

from flt_mol.analysis.accuracy.charges import (
    COULOMB,
    NEGATIVE,
    POSITIVE,
    Clusters,
    coulomb_energy,
    ewald_energy,
    short_energy,
)
from flt_mol.analysis.accuracy.long_range import (
    LONG_RANGE_ROWS,
    experiments,
    long_range_page,
    reach_of_energies,
)
from flt_mol.analysis.accuracy.results import Results
from flt_mol.analysis.accuracy.rows import build, resolved
from flt_mol.analysis.accuracy.runs import Job, missing, run
from flt_mol.structures import Structures

F64 = torch.float64
UNIT = torch.eye(3, dtype=F64)


def lattice(points, charges, edge, times=1):
    """Places (in edges), charges and cell of a cubic lattice, repeated."""
    shifts = torch.tensor(list(itertools.product(range(times), repeat=3)), dtype=F64)
    places = (torch.tensor(points, dtype=F64)[None] + shifts[:, None]).flatten(0, 1)
    return (
        torch.tensor(charges, dtype=F64).repeat(len(shifts)), edge * places, edge * times * UNIT
    )  # fmt: skip


CORNERS = list(itertools.product((0.0, 0.5), repeat=3))
SALT = [1.0 - 2 * (round(2 * sum(point)) % 2) for point in CORNERS]
ZINC_BLENDE = [*((0.0, *f) for f in ((0.0, 0.0), (0.5, 0.5))), (0.5, 0.0, 0.5), (0.5, 0.5, 0.0)]


@pytest.mark.parametrize(
    ("points", "charges", "nearest", "madelung"),
    [
        (CORNERS, SALT, 0.5, 1.7475645946),
        ([(0.0, 0, 0), (0.5, 0.5, 0.5)], [1.0, -1.0], math.sqrt(0.75), 1.7626747731),
        ([*ZINC_BLENDE, *((x + 0.25, y + 0.25, z + 0.25) for x, y, z in ZINC_BLENDE)],
         [1.0] * 4 + [-1.0] * 4, math.sqrt(3) / 4, 1.6380550534),
    ],
)  # fmt: skip
def test_ewald_sums_have_the_madelung_constants_of_crystals(points, charges, nearest, madelung):
    """NaCl, CsCl and ZnS, and the same in a supercell and at another scale."""
    formulas = len(charges) / 2
    for edge, times in ((1.0, 1), (4.0, 1), (5.0, 2)):
        q, places, cell = lattice(points, charges, edge, times)
        per_formula = ewald_energy(q, places, cell) / formulas / times**3
        found = -per_formula * nearest * edge / COULOMB
        assert found == pytest.approx(madelung, abs=1e-7)


def test_ewald_sums_know_skewed_cells_and_shifts_by_lattice_vectors():
    generator = torch.Generator().manual_seed(0)
    cell = 6 * UNIT + torch.randn(3, 3, generator=generator, dtype=F64)
    places = torch.rand(6, 3, generator=generator, dtype=F64) @ cell
    q = torch.tensor([1.0, -1, 0.5, -0.5, 2, -2], dtype=F64)
    energy = ewald_energy(q, places, cell)
    skew = torch.tensor([[1.0, 1, 0], [0, 1, 0], [0, -1, 1]], dtype=F64) @ cell
    moved = places + torch.randint(-2, 3, (6, 3), generator=generator).to(F64) @ cell
    for other in ((places, skew), (moved, cell), (places + 3, cell)):
        assert ewald_energy(q, *other) == pytest.approx(energy, abs=1e-6)


def test_a_large_box_of_a_quadrupole_is_like_none():
    """Without charge and dipole the images' effect falls with the fifth power of the edge."""
    places = torch.tensor([[0.0, 0, -2], [0, 0, 0], [0, 0, 2]], dtype=F64)
    q = torch.tensor([1.0, -2.0, 1.0], dtype=F64)
    alone = coulomb_energy(q, places)
    assert alone == pytest.approx(COULOMB * (-1 - 1 + 0.25))
    assert ewald_energy(q, places, 60 * UNIT) == pytest.approx(alone, abs=1e-4)


def test_charged_boxes_have_no_energy():
    with pytest.raises(ValueError, match=r"add up to 1 e"):
        ewald_energy(torch.tensor([1.0]), torch.zeros(1, 3), UNIT)


def test_coulomb_energies_are_sums_over_pairs():
    places = torch.tensor([[0.0, 0, 0], [3, 0, 0], [0, 4, 0]], dtype=F64)
    q = torch.tensor([1.0, -1.0, 2.0], dtype=F64)
    assert coulomb_energy(q, places) == pytest.approx(COULOMB * (-1 / 3 + 2 / 4 - 2 / 5))
    assert coulomb_energy(q, places, within=4.5) == pytest.approx(COULOMB * (-1 / 3 + 2 / 4))
    screened = -math.exp(-1.5) / 3 + math.exp(-2) / 2 - 2 * math.exp(-2.5) / 5
    assert coulomb_energy(q, places, screening=2.0) == pytest.approx(COULOMB * screened)


def test_the_repulsion_ends_knows_kinds_and_sees_images():
    places = torch.tensor([[0.0, 0, 0], [3, 0, 0], [0, 3.9999999, 0]], dtype=F64)
    for signs, strength in (([1, 1, 1], 1.5), ([1, -1, 1], 0.5), ([-1, 1, -1], 0.5),
                            ([-1, -1, 1], 1.0)):  # fmt: skip
        energy = short_energy(torch.tensor(signs), places, 0 * UNIT, False, 4.0)
        assert energy == pytest.approx(strength / 64)
    boxed = short_energy(torch.tensor([1]), places[:1], 3 * UNIT, True, 4.0)
    assert boxed == pytest.approx(3 * 1.5 / 64)


@pytest.mark.parametrize("periodic", [False, True])
def test_clusters_are_what_they_say(periodic):
    corpus = Clusters(periodic=periodic, size=14.0, fewest=4, most=8, train=6, test=5)
    found = corpus.load("train")
    assert len(found) == 6
    assert len(corpus.load("test")) == 5
    assert corpus.load("test")[0].energy != found[0].energy
    for system, again in zip(found, corpus.load("train"), strict=True):
        assert torch.equal(system.positions, again.positions)
        assert 4 <= system.num_atoms <= 8
        signs = torch.where(system.atomic_numbers == POSITIVE, 1, -1)
        assert set(system.atomic_numbers.tolist()) == {POSITIVE, NEGATIVE}
        assert signs.sum() == 0
        assert len(system.with_pairs(1.99).pairs.index_i) == 0
        places, cell = system.positions.to(F64), system.cell[0].to(F64)
        whole = (places, cell) if periodic else (places,)
        far = (ewald_energy if periodic else coulomb_energy)(0.5 * signs, *whole)
        near = short_energy(signs, places, cell, periodic, 4.0)
        assert system.energy.item() == pytest.approx(far + near, abs=1e-9)
        if not periodic:
            assert system.positions.norm(dim=1).max() <= 7
    other = Clusters(periodic=periodic, size=14.0, fewest=4, most=8, train=6, seed=1).load("train")
    assert other[0].energy != found[0].energy


def test_clusters_that_cannot_be():
    with pytest.raises(ValueError, match="even numbers"):
        Clusters(most=31)
    with pytest.raises(ValueError, match="screening is for open systems"):
        Clusters(periodic=True, screening=3.0)
    with pytest.raises(ValueError, match="do not fit into 4.0 Å"):
        Clusters(size=4.0).load("test")


def test_energies_reach_beyond_what_the_blocks_see():
    corpus = experiments(test=60)["open clusters"].corpus
    whole, beyond = reach_of_energies(corpus, 9.0)
    assert 0.4 * whole < beyond
    assert reach_of_energies(corpus, 100.0)[1] == pytest.approx(0, abs=1e-9)
    assert reach_of_energies(corpus, 0.0)[1] == pytest.approx(whole, rel=0.2)  # but the repulsion
    with pytest.raises(ValueError, match="convention"):
        reach_of_energies(Clusters(periodic=True), 9.0)


def test_only_rows_with_a_global_part_see_far():
    """Two pairs of charges 15 Å apart, one of them turned around."""
    apart = Clusters(size=14.0, fewest=4, most=4, test=1).load("test")[0]
    places = torch.tensor([[0.0, 0, 0], [0, 0, 3], [15, 0, 0], [15, 0, 3]])
    kinds = torch.tensor([[POSITIVE, NEGATIVE] * 2, [POSITIVE, NEGATIVE, NEGATIVE, POSITIVE]])
    for name, row in LONG_RANGE_ROWS.items():
        torch.manual_seed(0)
        model = build(row, resolved(row, "relaxed"))
        near, turned = (model(type(apart).single(kind, places))["energy"].item() for kind in kinds)
        # Each pair of charges by itself is the same in both.
        blind = ("pairs", "pairs_performer")
        assert (abs(near - turned) > 1e-5) == (name not in blind), name


def test_the_control_sees_far_but_not_where():
    """Other particles beyond the cutoff matter to it, their places do not."""
    row = LONG_RANGE_ROWS["pairs_performer"]
    model = build(row, resolved(row, "relaxed"))
    places, farther = (torch.tensor([[0.0, 0, 0], [0, 0, z]]) for z in (9.0, 13.0))

    def energy(kinds, places):
        return model(Structures.single(kinds, places))["energy"].item()

    both = energy([POSITIVE, NEGATIVE], places)
    assert energy([POSITIVE, NEGATIVE], farther) == pytest.approx(both, abs=1e-6)
    apart = energy([POSITIVE], places[:1]) + energy([NEGATIVE], places[1:])
    assert abs(both - apart) > 1e-4


def test_the_table_of_a_few_systems(tmp_path):
    every = experiments(epochs=1, train=8, test=4)
    results = Results(tmp_path / "results.jsonl")
    names = ["pairs", "pairs_performer", "pairs_spectral"]
    empty = long_range_page(every, results, names)
    assert empty.splitlines()[2].split("|")[3:5] == empty.splitlines()[3].split("|")[3:5]
    for experiment in every.values():
        for _ in run(experiment, results, missing(experiment, results, names, [0, 1])):
            pass
        assert missing(experiment, results, names, [0, 1]) == []
        assert missing(experiment, results, names, [2]) == [Job(name, 2) for name in names]
    lines = long_range_page(every, results, names).splitlines()
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells[0] == "pairs only"
    assert cells[3:5] == ["2", "1.00"]
    assert cells[8:10] == ["2", "1.00"]
    control = [cell.strip() for cell in lines[3].split("|")[1:-1]]
    assert control[0] == "pairs + attention, no positions"
    assert (control[5], control[10]) == ("1.00", "1.00")
    assert float(cells[5]) == pytest.approx(1 / float(control[4]), abs=0.02)
    assert len(lines[0].split("|")) == len(lines[3].split("|"))
    assert "cutoff times blocks" in lines[-1]
