"""All systems of one slab of the EMT data set, as plain data that JSON holds exactly."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from flt_mol.data.emt import filters, plan
from flt_mol.data.emt.relax import relax
from flt_mol.data.emt.surfaces import Slab, adsorption_energy, on_grid, place_adsorbate, relax_slab

_SLAB_ATTEMPTS = 20


def make_slab_systems(seed: int, slab: int) -> dict[str, Any]:
    """Draws, relaxes and filters the systems of slab number `slab`; a pure function.

    Returns:
        slab, split, facet, layers, elements; how many placements were `tried`, how many `dropped`
        (reason → count), how many draws of the slab itself (`slabs_dropped`); `records`: systems
        with the data set's fields as lists.

    Raises:
        RuntimeError: no stable slab in 20 draws.
    """
    split = plan.split_of(slab)
    dropped: Counter[str] = Counter()
    clean, rng, attempt = _clean_slab(seed, slab, split)
    records, tried = [], 0
    for k, name in enumerate(plan.draw_adsorbates(split, rng)):
        for attempted in range(plan.TRIES):
            tried += 1
            system_rng = plan.generator(seed, slab, attempt, k, attempted)
            record, reason = make_system(clean, name, system_rng)
            if reason is None:
                records.append({**record, "sid": slab * 10 + k, "slab": slab})
                break
            dropped[reason] += 1
    symbols = clean.atoms.get_chemical_symbols()
    return {
        "slab": slab,
        "split": split,
        "facet": clean.facet,
        "layers": clean.layers,
        "elements": sorted(set(symbols)),
        "slabs_dropped": attempt,
        "tried": tried,
        "dropped": dict(dropped),
        "records": records,
    }


def _clean_slab(seed: int, slab: int, split: str) -> tuple[Slab, np.random.Generator, int]:
    """A stable relaxed slab, its generator, and how many draws before it were dropped."""
    for attempt in range(_SLAB_ATTEMPTS):
        rng = plan.generator(seed, slab, attempt)
        draw = plan.draw_slab(split, rng)
        clean = relax_slab(
            draw.build(), draw.facet, draw.size[2], fmax=plan.SLAB_FMAX, steps=plan.STEPS
        )
        stable = clean.displacement <= filters.RECONSTRUCTED
        if clean.outcome == "converged" and stable:
            return clean, rng, attempt
    raise RuntimeError(f"slab {slab} of seed {seed}: no stable slab in {_SLAB_ATTEMPTS} draws")


def make_system(
    slab: Slab, name: str, rng: np.random.Generator
) -> tuple[dict[str, Any], str | None]:
    """One placement of one adsorbate: its record and None, or {} and why it is dropped.

    Energies belong to the stored positions exactly: both start and end are on the grid.
    """
    system = place_adsorbate(slab, name, rng)
    y_init = adsorption_energy(system, slab)
    if filters.out_of_range(y_init):
        return {}, "energy_init_out_of_range"
    start = system.positions.copy()
    stop = filters.dissociation_check(name, system)
    outcome = relax(system, fmax=plan.FMAX, steps=plan.STEPS, stop=stop)
    if outcome != "converged":
        return {}, outcome
    system.set_positions(on_grid(system.positions), apply_constraint=False)
    y_relaxed = adsorption_energy(system, slab)
    reason = filters.verdict(system, slab, y_relaxed, outcome)
    if reason is not None:
        return {}, reason
    tags = system.get_tags()
    return {
        "pos": start.tolist(),
        "pos_relaxed": system.positions.tolist(),
        "cell": system.cell.array.tolist(),
        "pbc": [True, True, True],
        "atomic_numbers": system.numbers.tolist(),
        "tags": tags.tolist(),
        "fixed": (tags == 0).astype(int).tolist(),
        "natoms": len(system),
        "y_init": y_init,
        "y_relaxed": y_relaxed,
        "adsorbate": name,
        "facet": slab.facet,
    }, None
