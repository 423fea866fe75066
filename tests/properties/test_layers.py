"""Every layer and model × every property it claims, and, as its docs say, those it does not have.

To add one: a function seed → layer under test in `builders`, and a `Case` here.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from properties.builders import (
    C,
    attention,
    block,
    blocks_with_filters,
    corrected_attention,
    cross,
    encoder,
    energy_model,
    image_attention,
    local_filter,
    multihead,
    padded,
    seeded,
    spectral_filter,
)
from torch import nn

from flt_mol.nn.frequencies import LatticeFrequencies, LebedevFrequencies
from flt_mol.nn.spectrum import SPECTRA
from helpers import checks
from helpers import invariances as testing
from helpers.invariances import random_rows

NUMBERS = {"save_load", "dtype", "bfloat16", "float16", "gradients"}
BASIC = frozenset({"alone", "small", *NUMBERS})
SETS = BASIC | {"permutation"}
PLACED = SETS | {"translation", "coincident"}
CRYSTALS = PLACED | {"rotation", "images", "cell_basis", "supercell"}
PADDED = frozenset({"padding", "padded_equals_packed"})
# What a spectrum could break.
SPECTRAL = frozenset({"translation", "save_load", "bfloat16", "coincident"})
FAST = {"permutation", "translation", "alone", "causality", "gradients", *PADDED}
BLIND = frozenset({"rotation", "causality"})


@dataclass(frozen=True)
class Case:
    """A layer, what it is tried on, and what it claims.

    Args:
        name: in the test's name.
        build: seed → layer under test; seeds are for weights and random features.
        claims: names of `CHECKS` that pass.
        lacks: names of `CHECKS` that fail, as the layer's docs say.
        rows: for `random_rows`.
        settings: {name of a check: its arguments}, such as a stated error as `tolerance`.
    """

    name: str
    build: Callable[[int], nn.Module]
    claims: frozenset[str]
    lacks: frozenset[str] = frozenset()
    rows: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)


def padded_equals_packed(layer, rows):
    ptr = {"ptr": rows.ptr}
    with torch.no_grad():
        packed = layer.eval().module(rows.x, rows.positions, **ptr)
        torch.testing.assert_close(layer(rows), packed, rtol=0, atol=1e-6)


CHECKS = {
    "permutation": testing.check_permutation,
    "translation": testing.check_translation,
    "rotation": testing.check_rotation,
    "images": testing.check_periodic_images,
    "cell_basis": testing.check_cell_basis,
    "supercell": testing.check_supercell,
    "alone": checks.check_alone,
    "small": checks.check_empty_and_single_atom,
    "padding": checks.check_padding,
    "padded_equals_packed": padded_equals_packed,
    "causality": checks.check_causality,
    "save_load": checks.check_save_load,
    "dtype": checks.check_dtype,
    "bfloat16": checks.check_autocast,
    "float16": checks.check_autocast,
    "gradients": checks.check_gradients,
    "coincident": checks.check_coincident,
}
DEFAULTS = {
    "alone": {"larger": 10},
    "coincident": {"second": True},
    "float16": {"dtype": torch.float16, "tolerance": 0.003},
    "bfloat16": {"dtype": torch.bfloat16, "tolerance": 0.02},
}
# A bias of keys shifts all logits of a query alike: exact attention cannot see it.
EXACT = {"gradients": {"invisible": ["*key.bias"]}}
SEQUENCE = {"dim": 1}
CRYSTAL = {"periodic": True}
SLAB = {"periodic": (True, True, False)}


# Deterministic frequencies for distances up to 8 Å: rotation invariance with a stated error.
BCC = LatticeFrequencies(8.0, (2.0, 3.0))
SHELLS = LebedevFrequencies(8.0, (2.0, 3.0))

CASES = [
    Case("linear", attention(), PLACED, BLIND),
    Case("exact", attention(mode="exact"), PLACED, BLIND, settings=EXACT),
    Case("auto", attention(mode="auto", exact_below=6), PLACED, BLIND),
    Case("linear without rpe", attention(dim=None), SETS, rows={"dim": None}),
    Case(
        "exact without rpe",
        attention(dim=None, mode="exact"),
        SETS,
        frozenset(),
        {"dim": None},
        EXACT,
    ),
    *(
        Case(f"linear {name}", attention(feature_map=name), PLACED, BLIND)
        for name in ("hyperbolic", "relu", "learned_relu", "softplus", "elu")
    ),
    *(
        Case(f"spectrum {name}", attention(spectrum=name), SPECTRAL)
        for name in sorted(SPECTRA.keys() - {"sum", "product", "gaussian"})
    ),
    Case(
        "exact bcc",
        attention(frequencies=BCC, mode="exact"),
        PLACED | {"rotation"},
        settings={**EXACT, "rotation": {"tolerance": 2e-5}},
    ),
    Case(
        "exact shells",
        attention(frequencies=SHELLS, mode="exact"),
        PLACED | {"rotation"},
        settings={**EXACT, "rotation": {"tolerance": 2e-5}},
    ),
    Case("sequence", attention(dim=1), PLACED, frozenset({"causality"}), SEQUENCE),
    *(
        Case(
            f"causal {mode} {feature_map}",
            attention(dim=1, causal=True, mode=mode, feature_map=feature_map),
            PLACED - {"permutation"} | {"causality"},
            frozenset({"permutation"}),
            SEQUENCE,
            EXACT if mode == "exact" else {},
        )
        for mode, feature_map in [
            ("linear", "softmax"),
            ("linear", "softplus"),
            ("exact", "softmax"),
        ]
    ),
    Case("padded linear", padded(), PLACED | PADDED, BLIND),
    Case("padded softplus", padded(feature_map="softplus"), PLACED | PADDED),
    Case("padded exact", padded(mode="exact"), PLACED | PADDED, BLIND, settings=EXACT),
    Case("padded auto", padded(mode="auto", exact_below=6), PLACED | PADDED),
    Case(
        "padded causal", padded(dim=1, causal=True), BASIC | PADDED | {"causality"}, rows=SEQUENCE
    ),
    Case("multihead", multihead(), PLACED | {"padding"}, BLIND),
    Case("cross linear", cross(), PLACED, BLIND),
    Case("cross exact", cross(mode="exact"), PLACED, settings=EXACT),
    Case("linear block", block("linear"), PLACED),
    Case("exact block", block("exact"), PLACED, settings=EXACT),
    Case("linear encoder", encoder("linear"), PLACED),
    Case("exact encoder", encoder("exact"), PLACED, settings=EXACT),
    Case(
        "linear energy model",
        energy_model("linear"),
        PLACED,
        frozenset({"rotation", "images"}),
        CRYSTAL,
    ),
    Case("exact energy model", energy_model("exact"), PLACED, rows=CRYSTAL, settings=EXACT),
    Case("spectral filter by kernels", spectral_filter(kernels_below=99), CRYSTALS, rows=CRYSTAL),
    Case("spectral filter by waves", spectral_filter(kernels_below=0), CRYSTALS, rows=CRYSTAL),
    Case("spectral filter of slabs", spectral_filter(), CRYSTALS, rows=SLAB),
    Case("spectral filter of molecules", spectral_filter(), PLACED | {"rotation"}),
    Case("local filter", local_filter(), CRYSTALS, rows=CRYSTAL),
    Case("local filter with vectors", local_filter(3), CRYSTALS, rows=CRYSTAL),
    Case("local filter by elements", local_filter(3, pair_types=True), CRYSTALS, rows=SLAB),
    Case("local filter of molecules", local_filter(3), PLACED | {"rotation"}),
    Case(
        "block of all parts",
        blocks_with_filters("attention", "spectral", "local"),
        CRYSTALS,
        rows=CRYSTAL,
    ),
    Case("block of filters", blocks_with_filters("spectral", "local"), CRYSTALS, rows=SLAB),
    Case("block of a local filter", blocks_with_filters("local"), PLACED | {"rotation"}),
    Case(
        "exact block of all parts",
        blocks_with_filters("attention", "spectral", "local", mode="exact"),
        CRYSTALS,
        rows=SLAB,
        settings=EXACT,
    ),
    # 5 atoms attend in full, 20 by the estimate.
    Case(
        "auto block of all parts",
        blocks_with_filters("attention", "spectral", "local", mode="auto", exact_below=7),
        CRYSTALS - {"supercell"},
        frozenset({"supercell"}),
        CRYSTAL,
    ),
    Case(
        "recycled blocks of all parts",
        blocks_with_filters("attention", "spectral", "local", count=2),
        CRYSTALS,
        rows=CRYSTAL,
    ),
    Case(
        "pairs in linear attention",
        corrected_attention("linear"),
        CRYSTALS - {"supercell"},
        frozenset({"supercell"}),
        CRYSTAL,
    ),
    Case(
        "pairs in exact attention",
        corrected_attention("exact"),
        CRYSTALS - {"supercell"},
        frozenset({"supercell"}),
        CRYSTAL,
        EXACT,
    ),
    Case("image keys", image_attention, CRYSTALS, rows=CRYSTAL, settings=EXACT),
    Case("image keys of slabs", image_attention, CRYSTALS, rows=SLAB, settings=EXACT),
]


def run(case, name):
    layer = case.build(1)
    rows = random_rows(seeded(0), **{"width": C, **case.rows})
    arguments = {**DEFAULTS.get(name, {}), **case.settings.get(name, {})}
    if name == "save_load":
        arguments["build"] = lambda: case.build(2)
    return CHECKS[name](layer, rows=rows, **arguments)


def pairs(attribute):
    return [
        pytest.param(
            case, name, id=f"{case.name}-{name}", marks=[] if name in FAST else pytest.mark.slow
        )
        for case in CASES
        for name in sorted(getattr(case, attribute))
    ]


@pytest.mark.parametrize(("case", "name"), pairs("claims"))
def test_what_a_layer_claims(case, name):
    run(case, name)


@pytest.mark.parametrize(("case", "name"), pairs("lacks"))
def test_what_a_layer_lacks(case, name):
    with pytest.raises(AssertionError, match="outputs changed"):
        run(case, name)


@pytest.mark.parametrize("feature_map", ["softmax", "softplus", "elu"])
@pytest.mark.parametrize("dim", [None, 1, 3])
def test_token_by_token_is_the_whole(dim, feature_map):
    layer = attention(dim=dim, causal=True, feature_map=feature_map)(1).module.eval()
    rows = random_rows(seeded(0), width=C, dim=dim)
    # Along a sequence the place of the token is in the state.
    positions = rows.positions if dim == 3 else None
    steps = []
    with torch.no_grad():
        whole = layer(rows.x, positions, ptr=rows.ptr)
        for start, stop in itertools.pairwise(rows.ptr.tolist()):
            state = layer.initial_state(1)
            for row in range(start, stop):
                at = None if positions is None else positions[row : row + 1]
                out, state = layer.step(rows.x[row : row + 1], state, at)
                steps.append(out)
    error = (torch.cat(steps) - whole).abs().max()
    assert error <= 1e-5 * whole.abs().max()
