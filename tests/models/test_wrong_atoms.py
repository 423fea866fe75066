"""Structures made by hand with values that no atom has: refused in words, by sid."""

import re
from dataclasses import replace

import pytest
import torch
from conftest import KINDS, small_model

from flt_mol import Structures
from flt_mol.models import EnergyModel
from flt_mol.nn import EnergyHead
from flt_mol.nn.embedding import AtomEmbedding, AtomError, check_atoms

KINDS_HERE = ["rpe", "performer", "both filters", "centred images, pair types"]


@pytest.fixture
def structures():
    water = Structures.single([8, 1, 1], [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]], sid="a")
    copper = Structures.single([29], [[0, 0, 0]], cell=3.6 * torch.eye(3), pbc=True, sid=7)
    return Structures.cat([water, copper, water])


def at(x, row, value):
    out = x.clone()
    out[row] = value
    return out


WRONG = [
    ("atomic_numbers", 119, "atomic number 119, expected 1 to 118"),
    ("atomic_numbers", 0, "atomic number 0, expected 1 to 118"),
    ("atomic_numbers", -1, "atomic number -1, expected 1 to 118"),
    ("tags", 3, "tag 3, expected 0 (below the surface), 1 (surface) or 2 (adsorbate)"),
    ("tags", -1, "tag -1, expected 0 (below the surface), 1 (surface) or 2 (adsorbate)"),
]


@pytest.mark.parametrize("kind", KINDS_HERE)
@pytest.mark.parametrize(("name", "value", "reason"), WRONG)
def test_models_name_the_system(kind, name, value, reason, structures):
    model = small_model(**KINDS[kind])
    for row, where in ((0, "sid a: atom 0"), (3, "sid 7: atom 0"), (6, "sid a: atom 2")):
        wrong = at(getattr(structures, name), row, value)
        message = re.escape(f"{where} (counted from 0) has {reason}")
        for dtype in (torch.int64, torch.int32):
            with pytest.raises(ValueError, match=f"^{message}$"):
                model(replace(structures, **{name: wrong.to(dtype)}))


def test_the_first_of_several_is_named(structures):
    numbers, tags = at(structures.atomic_numbers, 5, 0), at(structures.tags, 4, 9)
    with pytest.raises(AtomError, match="atom 4 .* has tag 9") as found:
        check_atoms(numbers, tags)
    assert found.value.row == 4
    with pytest.raises(ValueError, match="sid a: atom 0 .* has tag 9"):
        small_model()(replace(structures, atomic_numbers=numbers, tags=tags))


def test_all_atoms_that_there_are_pass():
    numbers, tags = torch.arange(1, 119), torch.arange(118) % 3
    embedding = AtomEmbedding(4)
    expected = embedding.element.weight[numbers] + embedding.tag.weight[tags]
    for dtype in (torch.int64, torch.int32):
        assert torch.equal(embedding(numbers.to(dtype), tags.to(dtype)), expected)
    assert embedding(numbers[:0], tags[:0]).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.bool, torch.float32])
def test_dtypes_that_are_no_indices(dtype, structures):
    """As uint8, tags would be a mask to the head."""
    numbers, tags = structures.atomic_numbers, structures.tags
    for name in ("atomic_numbers", "tags"):
        given = {"atomic_numbers": numbers, "tags": tags}
        given[name] = given[name].to(dtype)
        message = rf"^{name} are {dtype}, expected torch.int64: {name}.long\(\)$"
        with pytest.raises(ValueError, match=message):
            AtomEmbedding(4)(**given)
        with pytest.raises(ValueError, match=message):
            small_model().energies(**given, positions=structures.positions, ptr=structures.ptr)
    with pytest.raises(ValueError, match=f"^tags are {dtype}, expected torch.int64"):
        EnergyHead(4)(torch.zeros(7, 4), tags.to(dtype), structures.ptr)


def test_a_graph_is_compiled_and_exported_without_looking(structures):
    from flt_mol.models.export import export

    model = small_model().eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        # Graphs take the form that is differentiable: the same but for rounding.
        torch.testing.assert_close(compiled(structures)["energy"], model(structures)["energy"])
    fields = (getattr(structures, n) for n in ("atomic_numbers", "positions", "tags", "ptr"))
    found = export(model).module()(*fields)
    torch.testing.assert_close(found, model(structures)["energy"])


@pytest.mark.parametrize("numbers", [[119], [0, 8], torch.tensor([200]), [8.5]])
def test_elements_that_are_none_are_not_marked_as_seen(numbers):
    model = EnergyModel()
    with pytest.raises(ValueError, match=r"atomic_numbers (run from|are torch.float32)"):
        model.mark_seen(numbers)
    model.mark_seen([])
    assert not model.elements_seen.any()


def test_targets_with_atoms_that_are_none(structures):
    wrong = replace(
        structures, atomic_numbers=structures.atomic_numbers + 100, energy=torch.arange(3.0)
    )
    with pytest.raises(ValueError, match="atomic_numbers run from 101 to 129, expected 1 to 118"):
        EnergyModel().prepare(wrong)
