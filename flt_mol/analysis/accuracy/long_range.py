"""The second table: energies that reach farther than any cutoff, with and without a global part.

Charges of both signs (`charges.Clusters`) are so thinly spread that a particle has about one
neighbour within the cutoff of 4.5 Å: messages along pairs hardly travel, and what particles do to
each other beyond is invisible to pairs, however many blocks there are. `reach_of_energies` says
how much that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import Any

from flt_mol.analysis.accuracy.charges import Clusters, coulomb_energy
from flt_mol.analysis.accuracy.loop import Settings
from flt_mol.analysis.accuracy.report import entries
from flt_mol.analysis.accuracy.results import Results
from flt_mol.analysis.accuracy.rows import Row
from flt_mol.analysis.accuracy.runs import Experiment
from flt_mol.analysis.accuracy.table import DASH, Entry, ratio
from flt_mol.analysis.tables import markdown_table
from flt_mol.outputs import counted

__all__ = ["LONG_RANGE_ROWS", "experiments", "long_range_page", "reach_of_energies"]

CUTOFF = 4.5
BLOCKS = 2
BASE = "pairs"
CONTROL = "pairs_performer"

_PAIRS = {"cutoff": CUTOFF, "num_basis": 24, "density": False}
# Wider in space and coarser than for slabs: what is near is the pairs' business.
_SPECTRAL = {"num_heads": 4, "k_max": 0.2, "sigma_max": 4.0, "num_basis": 8}
_RPE = {"form": "amplitude", "num_terms": 16, "num_frequencies": 32, "sigma_max": 12.0,
        "frequency_sigma_min": 0.015, "frequency_sigma_max": 0.15}  # fmt: skip


def _row(label: str, **changes: Any) -> Row:
    config = {
        "embed_dim": 32,
        "num_heads": 4,
        "num_layers": BLOCKS,
        "ffn_dim": 64,
        "num_features": 32,
        "attention": "none",
        "rpe": None,
        "pairs": _PAIRS,
        "readout": "sum",
        "head_norm": False,
    }
    return Row(label, {**config, **changes})


LONG_RANGE_ROWS: dict[str, Row] = {
    BASE: _row("pairs only"),
    # Sees all particles, but not where they are: what a global part gives without distances.
    CONTROL: _row("pairs + attention, no positions", attention="linear"),
    "pairs_attention": _row("pairs + FLT attention", attention="linear", rpe=_RPE),
    "pairs_spectral": _row("pairs + spectral filter", spectral=_SPECTRAL),
    "pairs_both": _row("pairs + both", spectral=_SPECTRAL, attention="linear", rpe=_RPE),
}


def experiments(
    epochs: int = 20, train: int | None = None, test: int | None = None
) -> dict[str, Experiment]:
    """Open clusters and periodic boxes, by what the table calls them.

    Args:
        epochs: of training.
        train: systems to train on, where not as many as `Clusters` has.
        test: systems to evaluate on, likewise.
    """
    sizes = {"train": train, "test": test}
    given: dict[str, Any] = {name: n for name, n in sizes.items() if n is not None}
    settings = Settings("relaxed", epochs, batch_size=24, learning_rate=5e-3)
    corpora = {
        "open clusters": Clusters(**given),
        "periodic boxes": Clusters(periodic=True, size=16.0, **given),
    }
    return {
        label: Experiment(LONG_RANGE_ROWS, settings, corpus) for label, corpus in corpora.items()
    }


def reach_of_energies(corpus: Clusters, distance: float) -> tuple[float, float]:
    """Spread of the energies of open systems, and of what pairs beyond `distance` give to them, eV.

    Raises:
        ValueError: a periodic corpus, where no pair alone has an energy.
    """
    if corpus.periodic:
        raise ValueError("which pairs give which part of an Ewald sum is a matter of convention")
    every, far = [], []
    for system in corpus.load("test"):
        charges = (2.0 * (system.atomic_numbers == 11) - 1) * corpus.charge
        positions = system.positions
        whole = coulomb_energy(charges, positions, corpus.screening)
        near = coulomb_energy(charges, positions, corpus.screening, within=distance)
        far.append(whole - near)
        assert system.energy is not None
        every.append(system.energy.item())
    return stdev(every), stdev(far)


def long_range_page(
    all_of: Mapping[str, Experiment], results: Results, names: Sequence[str]
) -> str:
    """MAE of every row on both kinds of systems, ratios, and what is beyond the pairs' reach."""
    columns = {label: entries(each, results, names) for label, each in all_of.items()}
    head = ["row", "weights"]
    for label in columns:
        beside = [f"/ ({LONG_RANGE_ROWS[name].label})" for name in (BASE, CONTROL)]
        head += [f"MAE, {label}, eV", "n", *beside, "s/epoch"]
    rows = []
    for index, name in enumerate(names):
        found = [column[index] for column in columns.values()]
        weights = [w for entry in found if (w := entry.weights()) is not None]
        cells = [LONG_RANGE_ROWS[name].label, f"{weights[0]:,}" if weights else DASH]
        for column in columns.values():
            cells += _cells(column[index], column)
        rows.append(cells)
    return "\n\n".join([markdown_table(head, rows), _notes(all_of)])


def _cells(entry: Entry, column: Sequence[Entry]) -> list[str]:
    error, seconds = entry.error("test", "energy"), entry.seconds()
    if error is None or seconds is None:
        return [DASH, "0", DASH, DASH, DASH]
    by_name = {other.name: other for other in column}
    beside = [
        ratio(entry, by_name[name], "test", "energy") if name in by_name else DASH
        for name in (BASE, CONTROL)
    ]
    return [error.show(3), str(error.seeds), *beside, seconds.show(2)]


def _notes(all_of: Mapping[str, Experiment]) -> str:
    corpus = next(each.corpus for each in all_of.values() if not each.corpus.periodic)
    settings = next(iter(all_of.values())).settings
    text = (
        f"Charges ±{corpus.charge:g} e, {corpus.fewest} to {corpus.most} particles, {corpus.train} "
        f"systems to train on, {corpus.test} to test, {counted(settings.epochs, 'epoch')}, mean ± "
        "standard deviation over n seeds. The open clusters' energies have a spread of "
    )
    near, far = CUTOFF, CUTOFF * BLOCKS
    whole, beyond_near = reach_of_energies(corpus, near)
    _, beyond_far = reach_of_energies(corpus, far)
    return (
        f"{text}{whole:.2f} eV; the part that comes from pairs beyond {near:g} Å, the cutoff, one "
        f"of {beyond_near:.2f} eV, and the part from beyond {far:g} Å, cutoff times blocks, one of "
        f"{beyond_far:.2f} eV."
    )
