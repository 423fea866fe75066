"""Tags by hand-made slabs, by what a slab may be moved and turned to, and by stored ones."""

import numpy as np
import pytest
from ase import Atoms
from ase.build import add_adsorbate, bcc110, bulk, fcc111, fcc211, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from ase.io import write
from slabs import platinum

from flt_mol.data import from_ase, from_trajectories, open_dataset, tag_slab, to_ase
from flt_mol.data.ase import atoms_record
from flt_mol.data.recipes import recipe
from flt_mol.data.tags import (
    layer_note,
    parse_rule,
    slab_tagger,
    tag_structures,
    tagger_of,
    tags_are_layers,
)
from flt_mol.structures import Structures

TOP_LAYER = [0] * 8 + [1] * 4 + [2] * 2


def oxide():
    """Four layers of rock salt with CO upright on a metal atom."""
    atoms = bulk("MgO", "rocksalt", a=4.2, cubic=True).repeat((1, 1, 2))
    atoms.center(vacuum=8.0, axis=2)
    x, y, z = max((a for a in atoms if a.symbol == "Mg"), key=lambda a: a.z).position
    return atoms + Atoms("CO", positions=[[x, y, z + 2.4], [x, y, z + 3.55]])


def test_top_layer_and_adsorbate_are_found_and_the_atoms_left_alone():
    atoms = platinum(tags=False)
    atoms.set_constraint(FixAtoms([3]))
    before = atoms.copy()
    tagged = tag_slab(atoms)
    assert tagged.get_tags().tolist() == TOP_LAYER
    assert atoms == before
    assert atoms.constraints[0].index.tolist() == tagged.constraints[0].index.tolist() == [3]
    fixed = tag_slab(atoms, fix=True)
    assert [c.index.tolist() for c in fixed.constraints] == [list(range(8))]


@pytest.mark.parametrize("adsorbate", ["CO", "OC", [12, 13], [-1, -2], np.array([13, 12, 12])])
def test_ways_to_name_the_adsorbate(adsorbate):
    assert tag_slab(platinum(tags=False), adsorbate).get_tags().tolist() == TOP_LAYER


def test_atoms_by_mask_and_atoms_that_are_not_there():
    atoms = platinum(tags=False)
    mask = np.isin(atoms.symbols, ["C", "O"])
    for given in (mask, mask.tolist(), np.flatnonzero(mask)):
        assert tag_slab(atoms, given).get_tags().tolist() == TOP_LAYER
    for wrong in ([14], [-15], [1.5], ["C"], [None], mask[1:]):
        with pytest.raises(ValueError, match="has atoms 0 to 13"):
            tag_slab(atoms, wrong)


def test_layers_by_number():
    atoms = platinum(tags=False)
    assert tag_slab(atoms, surface=1).get_tags().tolist() == TOP_LAYER
    two = [0] * 4 + [1] * 8 + [2] * 2
    assert tag_slab(atoms, surface=2).get_tags().tolist() == two
    assert tag_slab(atoms, surface="half").get_tags().tolist() == two
    with pytest.raises(ValueError, match="has 3 layers, of which 3 cannot be the surface"):
        tag_slab(atoms, surface=3)
    for wrong in ("top", 0, True, 1.5):
        with pytest.raises(ValueError, match="expected oc20, half or a number of layers"):
            tag_slab(atoms, surface=wrong)


def test_a_clean_slab():
    clean = platinum(tags=False)[:12]
    assert tag_slab(clean, "none").get_tags().tolist() == TOP_LAYER[:12]
    with pytest.raises(ValueError, match="H, C, N, O on one surface"):
        tag_slab(clean)


def moved(atoms, name):
    atoms = atoms.copy()
    if name == "through the boundary":
        atoms.positions += 0.55 * atoms.cell[2]
        atoms.wrap()
    elif name == "upside down":
        atoms.positions = -atoms.positions
        atoms.wrap()
    elif name == "vacuum along a":
        atoms.set_cell(atoms.cell.array[[2, 0, 1]])
    elif name == "left-handed":
        atoms.set_cell(atoms.cell.array[[0, 2, 1]])
    elif name == "turned":
        atoms.rotate(50, (1, 2, 3), rotate_cell=True)
    elif name == "open above":
        atoms.pbc = [True, True, False]
    elif name == "no third vector":
        atoms.pbc = [True, True, False]
        atoms.set_cell([*atoms.cell.array[:2], [0, 0, 0]])
    elif name == "far away":
        atoms.positions += [300.0, -500.0, 1000.0]
    elif name == "unwrapped":
        atoms.positions[::3] += atoms.cell[0] - 2 * atoms.cell[1] + atoms.cell[2]
    return atoms


MOVES = [
    "through the boundary", "upside down", "vacuum along a", "left-handed", "turned", "open above",
    "no third vector", "far away", "unwrapped",
]  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("surface", ["oc20", "half"])
def test_tags_do_not_depend_on_how_the_slab_lies(name, surface):
    for atoms in (platinum(tags=False), stepped()):
        expected = tag_slab(atoms, surface=surface).get_tags().tolist()
        assert set(expected) == {0, 1, 2}
        assert tag_slab(moved(atoms, name), surface=surface).get_tags().tolist() == expected


def stepped():
    atoms = fcc211("Pt", (3, 2, 4), vacuum=8.0)
    atoms.set_tags(0)
    atoms.pbc = True
    x, y, z = atoms.positions[atoms.positions[:, 2].argmax()]
    return atoms + Atoms("O", positions=[[x, y, z + 1.6]])


def test_steps_are_surface_down_to_the_foot_of_the_terrace():
    """Of fcc(211) the atoms of edge, terrace and step have 7, 9 and 10 neighbours, not 12."""
    atoms = stepped()
    tags = tag_slab(atoms).get_tags()[:-1]
    depth = atoms.positions[:-1, 2].max() - atoms.positions[:-1, 2]
    spacing = 3.92 / 24**0.5
    layer = np.rint(depth / spacing)
    assert set(layer[tags == 1]) >= {0, 1, 2}
    assert layer[tags == 1].max() <= 3
    assert len(set(layer)) == 12


def test_adsorbates_that_cannot_be_guessed_are_asked_for():
    both = platinum(tags=False)
    below = both[-1]
    both += Atoms("H", positions=[below.position - [0, 0, 3.05 + 2 * 2.263 + 1.5]])
    for atoms in (oxide(), both):
        with pytest.raises(ValueError, match='guessed.*name the atoms: adsorbate="CO"'):
            tag_slab(atoms)
    with pytest.raises(ValueError, match="above and below its middle"):
        tag_slab(both, [12, 13, 14])
    with pytest.raises(ValueError, match="H, C, N, O on one surface"):
        tag_slab(Atoms("CO", cell=[3, 3, 20], pbc=True, positions=[[0, 0, 0], [0, 0, 1.2]]))


def test_a_formula_is_not_guessed_among_the_slab():
    atoms = oxide()
    with pytest.raises(ValueError, match="does not have one CO.*by number"):
        tag_slab(atoms, "CO")
    rows = [len(atoms) - 2, len(atoms) - 1]
    assert np.flatnonzero(tag_slab(atoms, rows).get_tags() == 2).tolist() == rows


def test_a_named_adsorbate_tells_which_face_is_up():
    atoms = platinum(tags=False)
    atoms.positions[:, 2] *= -1
    for adsorbate in ("CO", [12, 13]):
        for surface in ("oc20", 1):
            tags = tag_slab(atoms, adsorbate, surface=surface).get_tags()
            assert tags.tolist() == TOP_LAYER


def test_elements_within_a_layer_are_no_adsorbate():
    layer = Atoms("MgO", positions=[[0, 0, 8], [2.1, 2.1, 8]], cell=[4.2, 4.2, 20], pbc=True)
    with pytest.raises(ValueError, match="can be guessed"):
        tag_slab(layer)


def test_two_molecules_are_not_chosen_between():
    atoms = platinum(tags=False)
    atoms += Atoms("CO", positions=atoms.positions[-2:] + atoms.cell[0] / 2)
    with pytest.raises(ValueError, match="does not have one CO"):
        tag_slab(atoms, "CO")
    assert tag_slab(atoms, "C2O2").get_tags().tolist() == [*TOP_LAYER, 2, 2]


@pytest.mark.parametrize(
    ("adsorbate", "message"),
    [
        ("NO", "COPt12 does not have one NO.*0 of 1 N"),
        ("C(O", r"'C\(O': not a formula"),
        ("Xx", "0 of 1 Xx"),
        ("", "does not have one "),
        ([14], r"has atoms 0 to 13; the adsorbate is given as \[14\]"),
        ([0.5], "has atoms 0 to 13"),
        (range(14), "no slab remains"),
        ("Pt12CO", "no slab remains"),
    ],
)
def test_adsorbates_that_are_not_there(adsorbate, message):
    with pytest.raises(ValueError, match=message):
        tag_slab(platinum(tags=False), adsorbate)


def wire():
    atoms = platinum(tags=False)
    atoms.set_cell(atoms.cell.array * [[6], [1], [1]])
    return atoms


@pytest.mark.parametrize(
    ("atoms", "message"),
    [
        (molecule("CH3OH"), "is not a slab"),
        (molecule("CH3OH", vacuum=6.0, pbc=True), "gaps found: a 12"),
        (bulk("Pt", cubic=True) * (2, 2, 2), "at least 4 Å of vacuum"),
        (wire(), "along one lattice vector"),
        (Atoms(cell=[3, 3, 20], pbc=True), "no atoms"),
    ],
)
def test_what_is_no_slab_is_refused(atoms, message):
    with pytest.raises(ValueError, match=message):
        tag_slab(atoms)


def built(layers=3):
    slab = fcc111("Cu", (2, 2, layers), vacuum=8.0)
    add_adsorbate(slab, "O", 1.2, "fcc")
    return slab


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_layer_numbers_of_builders_are_known(layers):
    slab = built(layers)
    assert tags_are_layers(atoms_record(slab))
    assert "tag_slab" in layer_note(atoms_record(slab))["layers"]
    slab.rattle(0.1, rng=np.random.default_rng(0))
    slab.rotate(40, "x", rotate_cell=True)
    assert tags_are_layers(atoms_record(slab))
    assert tags_are_layers(atoms_record(bcc110("Fe", (1, 1, 3))))
    for rule in ("oc20", "half"):
        record = atoms_record(tag_slab(slab, surface=rule))
        assert not tags_are_layers(record)
        assert layer_note(record) == {}


def test_nothing_odd_is_taken_for_layers():
    good = atoms_record(built())
    tags = good["tags"]
    for name, value in (
        ("tags", None),
        ("tags", [1, 2]),
        ("tags", -np.asarray(tags)),
        ("tags", np.where(tags == 3, 1, np.where(tags == 1, 3, tags))),
        ("tags", np.where(tags == 3, 4, tags)),
        ("cell", np.zeros((3, 3))),
        ("cell", "abc"),
    ):
        assert not tags_are_layers({**good, name: value}), name


def test_rules_out_of_files():
    assert [parse_rule(v, "rule") for v in ("oc20", "half", "2", 3)] == ["oc20", "half", 2, 3]
    for wrong in (0, True, "top", None, 1.5):
        with pytest.raises(ValueError, match="rule is"):
            parse_rule(wrong, "rule")


def test_batches_keep_tags_that_are_there():
    tagged, bare = platinum(), platinum(tags=False)
    tagged.set_tags([0] * 4 + [1] * 8 + [2] * 2)
    held = bare.copy()
    held.set_constraint(FixAtoms([0]))
    batch = Structures.cat([from_ase(a, sid=i) for i, a in enumerate((tagged, bare, held))])
    found = tag_structures(batch)
    assert found.tags.tolist() == [*tagged.get_tags(), *TOP_LAYER, *TOP_LAYER]
    assert [one.fixed.sum().item() for one in found] == [0, 8, 1]
    assert batch.tags.tolist() == [*tagged.get_tags(), *[0] * 28]
    water = from_ase(molecule("H2O"), sid="w")
    with pytest.raises(ValueError, match="w: H2O is not a slab"):
        tag_structures(Structures.cat([batch, water]))


def agreement(data, surface, adsorbate):
    """Systems, those with all tags as stored, and those whose adsorbate is."""
    exact = found = 0
    for system in data:
        atoms = to_ase(system)
        stored = atoms.get_tags()
        atoms.set_tags(0)
        try:
            named = None if adsorbate is None else np.flatnonzero(stored == 2)
            tags = tag_slab(atoms, named, surface=surface).get_tags()
        except ValueError:
            continue
        exact += np.array_equal(tags, stored)
        found += np.array_equal(tags == 2, stored == 2)
    return len(data), exact, found


def test_agreement_with_the_shipped_data_is_what_is_said():
    data = recipe("emt_adsorption").open("val_ood_cat")
    assert agreement(data, "half", None) == (387, 387, 387)


def test_agreement_with_oc20_is_what_is_said(oc20_data):
    data = open_dataset(oc20_data / "is2re_val_20" / "data.lmdb")
    assert agreement(data, "oc20", "given") == (20, 16, 20)
    assert agreement(data, "half", None)[2] == 19


def relaxation(path, tags):
    """Frames in which the adsorbate leaves the surface, so that each would be tagged alone."""
    frames = []
    for step in range(4):
        slab = fcc111("Cu", (2, 2, 3), vacuum=7.0)
        add_adsorbate(slab, "O", 1.3 + 0.2 * step, "fcc")
        slab.positions[8:12, 2] -= 0.5 * step  # the upper layer sinks to the next
        if tags == 0:
            slab.set_tags(0)
        slab.calc = SinglePointCalculator(slab, energy=5.0 - step, forces=np.zeros((13, 3)))
        frames.append(slab)
    write(path, frames)
    return path


@pytest.mark.parametrize("tags", [0, "layers"])
def test_frames_of_a_relaxation_have_the_tags_of_its_first(tags, tmp_path):
    path = relaxation(tmp_path / "a.traj", tags)
    tagger = slab_tagger("O", "half")
    expected = [0] * 4 + [1] * 8 + [2]
    dataset = open_dataset(path, tag_slab=tagger, energy="calculator")
    for batch in (dataset.batch([3, 1]), dataset[0], dataset[2]):
        assert batch.tags.tolist() == expected * len(batch)
        assert batch.fixed.tolist() == [tag == 0 for tag in expected] * len(batch)
    (record,) = from_trajectories(path, references={"a": 1.0}, tag_slab=tagger)
    assert record.tags.tolist() == expected
    assert record.energy.item() == 1.0


def test_taggers_take_texts_and_name_the_system(tmp_path):
    path = relaxation(tmp_path / "a.traj", 0)
    assert open_dataset(path, tag_slab=slab_tagger("12", "1"))[0].tags.tolist() == (
        [0] * 8 + [1] * 4 + [2]
    )
    with pytest.raises(ValueError, match="N2"):
        open_dataset(path, tag_slab=slab_tagger("N2"))[0]
    with pytest.raises(ValueError, match=r"data\.tag_rule"):
        slab_tagger(surface="soft", name="data.tag_rule")
    assert tagger_of({"tag_slab": False}) is None
