"""Tags that ase.build made: numbers of layers, told from OC20's."""

import ase.io
import numpy as np
import pytest
from ase.build import add_adsorbate, bcc110, fcc111, surface

from flt_mol.data import from_ase, open_dataset, tag_slab
from flt_mol.data.ase.records import atoms_record
from flt_mol.data.slabs.numbered import layer_note, tags_are_layers


def built(layers=3, adsorbate="O", metal="Cu"):
    slab = fcc111(metal, (2, 2, layers), vacuum=8.0)
    if adsorbate:
        add_adsorbate(slab, adsorbate, 1.2, "fcc")
    return slab


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_slabs_of_builders_are_known(layers):
    slab = built(layers)
    assert tags_are_layers(atoms_record(slab))
    slab.rattle(0.1, rng=np.random.default_rng(0))
    slab.rotate(40, "x", rotate_cell=True)
    assert tags_are_layers(atoms_record(slab))
    assert not tags_are_layers(atoms_record(tag_slab(slab, surface="half")))


def test_other_builders():
    assert tags_are_layers(atoms_record(bcc110("Fe", (1, 1, 3))))
    assert tags_are_layers(atoms_record(built(1)))
    assert tags_are_layers(atoms_record(surface("Au", (2, 1, 1), 9, vacuum=6.0)))


@pytest.mark.parametrize("rule", ["oc20", "half", 1])
@pytest.mark.parametrize("turned", [False, True])
def test_tags_of_oc20_are_left_alone(rule, turned):
    slab = tag_slab(built(2 if rule == 1 else 3), surface=rule)
    if turned:  # the adsorbate hangs below
        slab.rotate(180, "x", center="COU")
    assert not tags_are_layers(atoms_record(slab))
    assert layer_note(atoms_record(slab)) == {}


def test_no_order_no_layers():
    slab = built(3)
    tags = slab.get_tags()
    slab.set_tags(np.where(tags == 3, 1, np.where(tags == 1, 3, tags)))  # from below
    assert not tags_are_layers(atoms_record(slab))
    slab.set_tags(np.where(tags == 3, 4, tags))  # one is left out
    assert not tags_are_layers(atoms_record(slab))


def test_nothing_odd_is_taken_for_layers():
    good = atoms_record(built())
    for name, value in (
        ("tags", None),
        ("tags", [1, 2]),
        ("tags", -np.asarray(good["tags"])),
        ("cell", np.zeros((3, 3))),
        ("cell", "abc"),
        ("pos", np.full((13, 3), np.nan)),
    ):
        assert not tags_are_layers({**good, name: value}), name


@pytest.mark.parametrize("ending", ["traj", "extxyz", "db"])
@pytest.mark.parametrize("layers", [2, 3])
def test_they_are_read_as_none_on_request(layers, ending, tmp_path, recwarn):
    path = tmp_path / f"a.{ending}"
    ase.io.write(path, built(layers))
    (one,) = open_dataset(path, layer_numbers=True)
    assert not one.tags.any()
    assert not any("layer" in str(warning.message) for warning in recwarn)
    ase.io.write(path, tag_slab(built(layers)))
    (one,) = open_dataset(path, layer_numbers=True)
    assert one.tags.tolist() == tag_slab(built(layers)).get_tags().tolist()


def test_the_mend_is_named():
    with pytest.raises(ValueError, match=r"tag_slab\(atoms, …\).*--tag-slab of flt-mol predict"):
        from_ase(built(3))
    assert "--tag-slab of flt-mol predict" in layer_note(atoms_record(built(2)))["layers"]
