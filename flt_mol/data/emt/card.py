"""The EMT data set's `dataset.yaml` and card: what it holds, in numbers."""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ase
import numpy as np
import yaml

from flt_mol.data.emt import filters, plan, surfaces, tables
from flt_mol.data.emt.baselines import Baseline, CompositionRegression, Constant, score
from flt_mol.files import temporary_path
from flt_mol.structures import Structures

Splits = Mapping[str, Sequence[Mapping[str, Any]]]
Chunks = Sequence[Mapping[str, Any]]

BASELINES: dict[str, type[Baseline]] = {"constant": Constant, "composition": CompositionRegression}

_HEAD = {
    "name": "emt_adsorption",
    "version": "1.0",
    "title": "Relaxed adsorption energies on fcc alloy surfaces, by effective medium theory",
    "task": "IS2RE: initial structure to relaxed adsorption energy",
    "source": "computed by flt_mol with ASE's EMT calculator",
    "licence": "CC-BY-4.0",
    "citation": [
        "K. W. Jacobsen, P. Stoltze, J. K. Nørskov, A semi-empirical effective medium theory for "
        "metals and alloys, Surf. Sci. 366, 394 (1996), doi 10.1016/0039-6028(96)00816-3",
        "A. Hjorth Larsen et al., The atomic simulation environment, J. Phys.: Condens. Matter "
        "29, 273002 (2017), doi 10.1088/1361-648X/aa680e",
    ],
}
_FIELDS = {
    "pos": "float32 (N, 3), Å, initial positions, multiples of 2^-12",
    "pos_relaxed": "float32 (N, 3), Å, relaxed positions, not wrapped, multiples of 2^-12",
    "cell": "float32 (3, 3), Å, rows are the lattice vectors",
    "pbc": "bool (3,), all True as in OC20",
    "atomic_numbers": "uint8 (N,), metal atoms first, adsorbate last",
    "tags": "uint8 (N,), 0 below the surface and fixed, 1 surface and free, 2 adsorbate",
    "fixed": "uint8 (N,), 1 exactly where the tag is 0",
    "sid": "int, name of the system, unique over all splits: 10 × slab + number",
    "natoms": "int, N",
    "y_init": "float, eV, adsorption energy of pos",
    "y_relaxed": "float, eV, adsorption energy of pos_relaxed: the target",
    "adsorbate": "str, its name",
    "facet": "str, 111, 100 or 110",
    "slab": "int, systems with the same number share the clean slab",
}


def write(output: Path, splits: Splits, chunks: Chunks, *, seed: int, num_slabs: int) -> None:
    """Writes `dataset.yaml` and the tables in `README.md` of the folder of the LMDB files.

    Args:
        output: folder with one LMDB file a split.
        splits: split → records.
        chunks: as `run_slabs` gives them.
        seed: of the run.
        num_slabs: of the run.
    """
    metadata = describe(output, splits, chunks, seed=seed, num_slabs=num_slabs)
    text = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=100)
    with temporary_path(output / "dataset.yaml") as path:
        path.write_text(text, encoding="utf-8")
    card = output / "README.md"
    existing = card.read_text(encoding="utf-8") if card.exists() else None
    with temporary_path(card) as path:
        path.write_text(tables.card(existing, metadata, splits, chunks), encoding="utf-8")


def describe(
    output: Path, splits: Splits, chunks: Chunks, *, seed: int, num_slabs: int
) -> dict[str, Any]:
    """All of `dataset.yaml` as plain values."""
    energies = np.array([record["y_relaxed"] for record in splits["train"]])
    numbers = {int(z) for records in splits.values() for r in records for z in r["atomic_numbers"]}
    return {
        **_HEAD,
        "generator": {
            "command": f"flt-mol data emt FOLDER --seed {seed}",
            "seed": seed,
            "num_slabs": num_slabs,
            "ase": ase.__version__,
            "numpy": np.__version__,
            "calculator": "ase.calculators.emt.EMT, asap_cutoff False",
            "fmax_eV_per_angstrom": {"system": plan.FMAX, "clean_slab": plan.SLAB_FMAX},
            "steps": plan.STEPS,
        },
        "units": {"length": "Å", "energy": "eV"},
        "energy": "E(slab + adsorbate) − E(relaxed clean slab) − Σ gas references of its atoms",
        "gas_references_eV_per_atom": {
            "rule": "H = H2/2, N = N2/2, O = H2O − H2, C = CO − O; molecules relaxed in EMT",
            **{symbol: round(value, 8) for symbol, value in surfaces.gas_references().items()},
        },
        "fields": _FIELDS,
        "tag_rule": "half",
        "elements": [ase.data.chemical_symbols[z] for z in sorted(numbers)],
        "adsorbates": {
            "trained": list(plan.TRAINED_ADSORBATES),
            "held_out": list(plan.HELD_OUT_ADSORBATES),
        },
        "alloys": {
            "held_out_pairs": [list(pair) for pair in plan.HELD_OUT_PAIRS],
            "rule": "slabs with both metals of a pair are in val_ood_cat and val_ood_both only, "
            "all slabs there are such",
        },
        "splits": {s: _split(output / f"{s}.lmdb", records) for s, records in splits.items()},
        "normalizer": {"mean": float(energies.mean()), "std": float(energies.std())},
        "filters": _filters(chunks),
        "baselines": _baselines(splits),
    }


def to_structures(record: Mapping[str, Any]) -> Structures:
    """A record as a batch of one, with its energies."""
    return Structures.single(
        record["atomic_numbers"].astype(np.int64),
        record["pos"],
        cell=record["cell"],
        pbc=record["pbc"],
        tags=record["tags"].astype(np.int64),
        fixed=record["fixed"].astype(bool),
        sid=record["sid"],
        energy=record["y_relaxed"],
        energy_initial=record["y_init"],
    )


def content_digest(records: Sequence[Mapping[str, Any]]) -> str:
    """sha256 of all fields of all records: the same wherever the same records are stored."""
    digest = hashlib.sha256()
    for record in records:
        for name, value in sorted(record.items()):
            content = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
            digest.update(name.encode() + b"=" + content + b";")
    return digest.hexdigest()


def decode(value: bytes) -> dict[str, Any]:
    """A record from bytes that this package wrote itself; files of others go to `open_dataset`."""
    record: dict[str, Any] = pickle.loads(zlib.decompress(value))
    return record


def _split(file: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    content = file.read_bytes()
    return {
        "file": file.name,
        "count": len(records),
        "slabs": len({record["slab"] for record in records}),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "sha256_of_content": content_digest(records),
    }


def _filters(chunks: Chunks) -> dict[str, Any]:
    dropped: Counter[str] = Counter()
    for chunk in chunks:
        dropped.update(chunk["dropped"])
    return {
        "placements_tried": sum(chunk["tried"] for chunk in chunks),
        "kept": sum(len(chunk["records"]) for chunk in chunks),
        "dropped": {
            reason: {"rule": filters.RULES[reason], "count": dropped[reason]}
            for reason in filters.REASONS
        },
        "clean_slabs_dropped": {
            "rule": "not converged, or an atom moved more than "
            f"{filters.RECONSTRUCTED:g} Å from the ideal lattice; drawn again",
            "count": sum(chunk["slabs_dropped"] for chunk in chunks),
        },
    }


def _baselines(splits: Splits) -> dict[str, dict[str, dict[str, float]]]:
    """Split → baseline → mae (eV) and ewt, fitted on train."""
    structures = {s: [to_structures(r) for r in records] for s, records in splits.items()}
    fitted = {name: kind.fit(structures["train"]) for name, kind in BASELINES.items()}
    result: dict[str, dict[str, dict[str, float]]] = {}
    for split, systems in structures.items():
        scores = {name: score(baseline, systems) for name, baseline in fitted.items()}
        result[split] = {
            name: {key: round(values[key], 6) for key in ("mae", "ewt")}
            for name, values in scores.items()
        }
    return result
