"""Energy models of every kind × every property, as far as their flags claim it, and what they lack.

To add one: a line in `conftest.KINDS`.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import KINDS, all_outputs, small_model

from helpers import checks
from helpers import invariances as testing
from helpers.invariances import random_structures

# Readouts of density models are larger than an eV before any training; float32 rounds them.
CHECKS = {
    "permutation": testing.check_permutation,
    "translation": testing.check_translation,
    "alone": checks.check_alone,
    "small": checks.check_empty_and_single_atom,
    "gradients": checks.check_gradients,
    "rotation": testing.check_rotation,
    "images": testing.check_periodic_images,
    "supercell": testing.check_supercell,
}
ALWAYS = ("permutation", "translation", "alone", "small")
SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"larger": 5},
    "rotation": {"tolerance": 1e-5},
    # 9 atoms and 81 are on either side of where "auto" changes.
    "supercell": {"repeats": [(1, 1, 2), (3, 3, 1)]},
}
NATOMS = (5, 1, 9)


@dataclass(frozen=True)
class Kind:
    """A model, and in what cells it is tried."""

    name: str
    changes: dict[str, Any]
    periodic: Any

    def build(self):
        model = small_model(**self.changes).eval()
        model.normalizer.fit(torch.tensor([-3.0, 1.0, 2.0]))
        return model

    def structures(self):
        return random_structures(torch.Generator().manual_seed(1), NATOMS, self.periodic)


CRYSTAL, SLAB, MOLECULE = True, (True, True, False), False
CASES = [
    *(
        Kind(name, changes, (CRYSTAL, SLAB)[k % 2])
        for k, (name, changes) in enumerate(KINDS.items())
    ),
    Kind("molecules", KINDS["pair types"], MOLECULE),
    Kind("features back", all_outputs(KINDS["both filters"], 3), CRYSTAL),
    Kind("positions back", all_outputs(KINDS["both filters"], 3, "positions"), SLAB),
    Kind("positions back, images", all_outputs(KINDS["centred images"], 2, "positions"), SLAB),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def run(name, model, structures):
    arguments = dict(SETTINGS.get(name, {}))
    if name == "supercell":
        arguments["extensive"] = model.config.readout != "mean"
    CHECKS[name](model, structures, **arguments)


def marked(name):
    return [] if name in ("permutation", "translation", "alone") else [pytest.mark.slow]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marked(name)) for name in ALWAYS])
@every_case
def test_what_every_model_claims(case, name):
    run(name, case.build(), case.structures())


@pytest.mark.slow
@every_case
def test_what_some_models_claim(case):
    """Those that do not claim it fail: no claim is left out for caution."""
    model, structures = case.build(), case.structures()
    claims = {
        "rotation": model.rotation_invariant,
        # Who sees no positions is not moved by lattice vectors either.
        "images": model.sees_images or model.config.rpe is None,
        "supercell": model.supercell_consistent,
    }
    for name, claimed in claims.items():
        if case.periodic is False and name != "rotation":
            continue
        if claimed:
            run(name, model, structures)
        else:
            with pytest.raises(AssertionError, match="energies changed"):
                run(name, model, structures)


@pytest.mark.slow
def test_there_are_models_that_see_images_and_others():
    flags = [
        (model.rotation_invariant, model.sees_images, model.supercell_consistent)
        for model in (case.build() for case in CASES)
    ]
    for column in zip(*flags, strict=True):
        assert set(column) == {True, False}
