import warnings

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from slabs import PLATINUM, ByHand, platinum
from torch_geometric.data import Batch, Data

import flt_mol
from flt_mol.data import from_ase, open_dataset
from flt_mol.models.checkpoint import (
    find_checkpoint,
    load_model,
    read_checkpoint,
    save_checkpoint,
)
from flt_mol.prediction import EnsembleEnergies, predict_structures, surface_rule
from flt_mol.prediction.energies import check_elements, energy_array
from flt_mol.prediction.members import tag_rules
from flt_mol.structures import Structures


def slabs(count=5):
    """Slabs whose energies differ: by an atom's element."""
    made = [platinum() for _ in range(count)]
    for place, atoms in enumerate(made):
        atoms.numbers[0] = 28 + place
    return made


def by_hand(atoms):
    return float(atoms.numbers.sum() + 100 * atoms.get_tags().sum())


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_energies_come_in_the_order_of_the_atoms(batch_size):
    atoms = slabs()
    energies = flt_mol.predict(atoms, ByHand(), batch_size)
    assert energies.dtype == np.float64
    assert energies.tolist() == [by_hand(one) for one in atoms]
    assert flt_mol.predict(atoms[0], ByHand()).shape == (1,)
    assert flt_mol.predict([], ByHand()).shape == (0,)


def test_a_shipped_model_does_not_depend_on_the_batch():
    atoms = [platinum() for _ in range(4)]
    for place, one in enumerate(atoms):
        one.positions[-1, 2] += 0.2 * place
    together = flt_mol.predict(atoms, "emt-small")
    assert len(set(together)) == 4
    alone = [flt_mol.predict(one, "emt-small", 1)[0] for one in atoms]
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_an_ensemble_has_mean_and_standard_deviation_with_one_degree_less():
    atoms = slabs(2)
    found = flt_mol.predict(atoms, [ByHand(1.0), ByHand(2.0), ByHand(6.0)])
    values = np.array([by_hand(one) for one in atoms])
    np.testing.assert_allclose(found.members, np.outer([1, 2, 6], values))
    np.testing.assert_allclose(found.mean, 3 * values)
    np.testing.assert_allclose(found.std, np.sqrt((4 + 1 + 9) / 2) * values)
    assert isinstance(found, EnsembleEnergies)
    assert len(found) == 2


def test_ensembles_that_mean_nothing_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two members"):
        flt_mol.predict(slabs(1), [ByHand()])
    content = dict(read_checkpoint(find_checkpoint("emt-small"))["config"])
    content["data"]["energy"] = "y_init"
    other = save_checkpoint(tmp_path / "other.ckpt", load_model("emt-small"), content)
    with pytest.raises(ValueError, match=r"y_init .*other.ckpt"):
        flt_mol.predict(slabs(1), ["emt-small", other])


@pytest.mark.parametrize(
    ("checkpoint", "device"), [(3, None), ("no-such-model", None), (ByHand(), "cpu")]
)
def test_other_checkpoints_are_refused(checkpoint, device):
    with pytest.raises(ValueError, match="checkpoint"):
        flt_mol.predict(slabs(1), checkpoint, device=device)


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True, None])
def test_batch_sizes_below_one_are_refused(batch_size):
    with pytest.raises(ValueError, match="batch_size"):
        flt_mol.predict(slabs(1), ByHand(), batch_size)


def test_what_is_no_atoms_is_named():
    with pytest.raises(ValueError, match=r"place 1: a str"):
        flt_mol.predict([platinum(), "slab.traj"], ByHand())
    with pytest.raises(ValueError, match=r"slab.traj does not exist"):
        flt_mol.predict("slab.traj", ByHand())


def as_data(atoms):
    return Data(
        pos=torch.tensor(atoms.positions),
        z=torch.tensor(atoms.numbers),
        tags=torch.tensor(atoms.get_tags()),
        fixed=torch.zeros(len(atoms)),
        cell=torch.tensor(atoms.cell.array)[None],
    )


@pytest.mark.parametrize(
    "make",
    [
        iter,
        tuple,
        open_dataset,
        lambda atoms: open_dataset(open_dataset(atoms)),
        lambda atoms: Structures.cat([from_ase(one) for one in atoms]),
        lambda atoms: [as_data(one) for one in atoms],
        lambda atoms: Batch.from_data_list([as_data(one) for one in atoms]),
        lambda atoms: {f"s{i}": one for i, one in enumerate(atoms)},
    ],
)
@pytest.mark.filterwarnings("ignore:.*in memory")
def test_whatever_holds_structures_is_predicted(make):
    atoms = slabs(3)
    assert flt_mol.predict(make(atoms), ByHand()).tolist() == [by_hand(one) for one in atoms]


def test_files_are_predicted(tmp_path):
    atoms = slabs(3)
    ase.io.write(tmp_path / "a.traj", atoms)
    assert flt_mol.predict(tmp_path / "a.traj", ByHand()).tolist() == [by_hand(x) for x in atoms]


def test_atoms_stay_and_their_targets_do_not_count():
    atoms = platinum()
    atoms.info["y_relaxed"] = float("nan")
    before = atoms.copy()
    assert flt_mol.predict(atoms, ByHand()).tolist() == [PLATINUM]
    assert atoms == before


def test_energies_that_are_not_finite_name_the_structure():
    atoms = slabs(3)
    for one, name in zip(atoms, "abc", strict=True):
        one.info["sid"] = name
    with pytest.raises(ValueError, match="structure a "):
        flt_mol.predict(atoms, ByHand(float("inf")))


def test_flags_of_the_modules_come_back():
    model = torch.nn.Sequential(ByHand(), torch.nn.Identity())
    model.train()
    model[1].eval()
    assert predict_structures(model, [from_ase(platinum())]).tolist() == [PLATINUM]
    assert [module.training for module in model.modules()] == [True, True, False]


def warned(atoms, model=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flt_mol.predict(atoms, model or ByHand())
    return [str(warning.message) for warning in caught]


def test_nothing_is_warned_of_where_all_is_well():
    assert warned(slabs()) == []


def narrow():
    slab = platinum()
    slab.set_cell([3, 3, slab.cell[2, 2]])
    slab.positions = slab.positions[:, [2, 0, 1]] * [0, 0, 1] + np.arange(len(slab))[:, None] * 0.9
    return slab


class Feedback(ByHand):
    config = type("Config", (), {"feedback": "positions"})()


class Blind(ByHand):
    sees_images = False


class Small(ByHand):
    trained_on = {"most_atoms": 6}  # noqa: RUF012


def doubled():
    slab = platinum()
    slab += Atoms("O", positions=[slab.positions[-1] + 0.1], tags=[2])
    return slab


@pytest.mark.parametrize(
    ("atoms", "model", "words"),
    [
        (platinum(tags=False), ByHand(), ["tags are 0", "1 of 3 structures (1)"]),
        (Atoms("H", tags=[2]), ByHand(), ["no cell", "1 of 3 structures (1)"]),
        (doubled(), ByHand(), ["0.5 Å", "1 of 3 structures (1)"]),
        (narrow(), Blind(), ["narrower", "1 of 3 structures (1)"]),
        (platinum(), Feedback(), ["no atom is fixed", "3 of 3 structures (0, 1, 2)"]),
        (platinum(), Small(), ["largest training system", "3 of 3"]),
        (platinum(), ByHand(seen=[6, 8]), ["elements never trained on: Pt"]),
    ],
)
def test_each_kind_of_warning_comes_once_and_names_structures(atoms, model, words):
    texts = warned([platinum(), atoms, platinum()], model)
    (text,) = [text for text in texts if words[0] in text]
    assert all(word in text for word in words)


def test_models_that_see_images_take_narrow_cells():
    assert not any("narrower" in text for text in warned(narrow()))


def test_energies_have_one_shape():
    assert energy_array(torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16)).tolist() == [1, 2]
    for wrong in ([[1.0, 2.0]], np.zeros((2, 1, 1)), ["a"], None, [True]):
        with pytest.raises(ValueError, match="pred"):
            energy_array(wrong, "pred")


def test_unseen_elements():
    assert check_elements(ByHand(seen=[1, 6]), [1, 8, 78, 8]) == ["O", "Pt"]
    assert check_elements(lambda structures: 0, [1]) == []


def test_the_tag_rule_is_found_in_the_run_or_the_data(tmp_path):
    model = load_model("emt-small")
    configs = {
        "run": {"data": {"name": "emt_adsorption", "tag_rule": 2}},
        "own": {"data": {"name": "emt_adsorption", "paths": {"train": "x.lmdb"}}},
        "older": {"data": {}, "inherited_tag_rule": {"surface": "half", "from": "emt-small"}},
    }
    paths = {x: save_checkpoint(tmp_path / x, model, config) for x, config in configs.items()}
    rules = {name: surface_rule(path) for name, path in paths.items()}
    assert rules == {"run": 2, "own": None, "older": "half"}
    assert surface_rule(["emt-small", paths["own"]]) == "half"
    assert tag_rules(["emt-small"]) == {"emt-small": "half"}
    with pytest.raises(ValueError, match=r"2 .*half"):
        surface_rule([paths["run"], "emt-small"])
