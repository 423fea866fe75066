"""The numbers on the EMT data set's card, as Markdown tables between two markers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flt_mol.data.emt import plan

Splits = Mapping[str, Sequence[Mapping[str, Any]]]
Chunks = Sequence[Mapping[str, Any]]

BEGIN = "<!-- begin: written by flt-mol data emt -->"
END = "<!-- end: written by flt-mol data emt -->"

_NEW_CARD = f"""# {{title}}

Made by `{{command}}`. Energies are of effective medium theory, which is no chemistry for H, C, N
and O. The fields are described in `dataset.yaml`.

{BEGIN}
{END}
"""


def card(existing: str | None, metadata: Mapping[str, Any], splits: Splits, chunks: Chunks) -> str:
    """The card with new tables: `existing` around its markers, or a short new one.

    A card whose markers are gone gets the tables at its end.
    """
    text = existing or _NEW_CARD.format(
        title=metadata["title"], command=metadata["generator"]["command"]
    )
    if BEGIN not in text or END not in text.partition(BEGIN)[2]:
        text = f"{text.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{tables(metadata, splits, chunks)}\n\n{END}{after}"


def tables(metadata: Mapping[str, Any], splits: Splits, chunks: Chunks) -> str:
    """All tables, each under its heading."""
    parts = {
        "Splits": _splits(metadata, splits),
        "Energies": _energies(splits),
        "Adsorbates": _adsorbates(splits),
        "Atoms": _histogram(splits, lambda record: record["natoms"], 8, "atoms"),
        "Slabs": _slabs(chunks),
        "Filters": _filters(metadata),
        "Baselines": _baselines(metadata),
    }
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in parts.items())


def table(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; every column but the first is set to the right.

    Example:
        >>> print(table(["split", "systems"], [["train", 3]]))
        | split | systems |
        |---|---:|
        | train | 3 |
    """
    lines = [heading, ["---"] + ["---:"] * (len(heading) - 1), *rows]
    return "\n".join(
        "|" + "|".join(cells) + "|" if i == 1 else "| " + " | ".join(map(str, cells)) + " |"
        for i, cells in enumerate(lines)
    )


def _splits(metadata: Mapping[str, Any], splits: Splits) -> str:
    rows = []
    for split, records in splits.items():
        about = metadata["splits"][split]
        atoms = [record["natoms"] for record in records]
        rows.append(
            [
                split,
                about["count"],
                about["slabs"],
                f"{np.mean(atoms):.1f}",
                f"{min(atoms)} to {max(atoms)}",
                f"{about['bytes']:,}",
            ]
        )
    return table(["split", "systems", "slabs", "atoms, mean", "atoms", "bytes"], rows)


def _values(records: Sequence[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    return np.array([record[name] for record in records], dtype=np.float64)


def _energies(splits: Splits) -> str:
    quantiles = ("min", "5 %", "25 %", "median", "75 %", "95 %", "max")
    rows = []
    for split, records in splits.items():
        for name in ("y_relaxed", "y_init"):
            y = _values(records, name)
            cells = [y.mean(), y.std(), *np.percentile(y, [0, 5, 25, 50, 75, 95, 100])]
            rows.append([f"{split} {name}", *(f"{value:.3f}" for value in cells)])
    statistics = table(["eV", "mean", "std", *quantiles], rows)
    histogram = _histogram(splits, lambda record: record["y_relaxed"], 0.25, "y_relaxed (eV)")
    return f"{statistics}\n\n{histogram}"


def _histogram(
    splits: Splits, value: Callable[[Mapping[str, Any]], float], width: float, title: str
) -> str:
    """Systems of each split in bins of `width`, lower edge included."""
    bins = {
        split: Counter(int(np.floor(value(record) / width)) for record in records)
        for split, records in splits.items()
    }
    occupied = [number for counts in bins.values() for number in counts]
    rows = [
        [f"{i * width:g} to {(i + 1) * width:g}", *(bins[split][i] for split in splits)]
        for i in range(min(occupied), max(occupied) + 1)
    ]
    return table([title, *splits], rows)


def _adsorbates(splits: Splits) -> str:
    rows = []
    for name in (*plan.TRAINED_ADSORBATES, *plan.HELD_OUT_ADSORBATES):
        chosen = {
            split: [record for record in records if record["adsorbate"] == name]
            for split, records in splits.items()
        }
        everything = [record for records in chosen.values() for record in records]
        if everything:
            y = _values(everything, "y_relaxed")
            counts = [len(records) for records in chosen.values()]
            rows.append([name, *counts, f"{y.mean():.2f} ± {y.std():.2f}"])
    return table(["adsorbate", *splits, "y_relaxed, mean ± std (eV)"], rows)


def _slabs(chunks: Chunks) -> str:
    properties: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "facet {}": lambda chunk: chunk["facet"],
        "{} layers": lambda chunk: str(chunk["layers"]),
        "{} elements": lambda chunk: str(len(chunk["elements"])),
    }
    rows = []
    for form, value in properties.items():
        counts = Counter((chunk["split"], value(chunk)) for chunk in chunks)
        for kind in sorted({kind for _, kind in counts}):
            rows.append([form.format(kind), *(counts[s, kind] for s in plan.SPLITS)])
    return table(["slabs", *plan.SPLITS], rows)


def _filters(metadata: Mapping[str, Any]) -> str:
    filters = metadata["filters"]
    tried = filters["placements_tried"]
    rows = [["placements tried", tried, "100.0 %"]]
    for reason, about in filters["dropped"].items():
        share = f"{100 * about['count'] / max(tried, 1):.1f} %"
        rows.append([f"`{reason}`: {about['rule']}", about["count"], share])
    rows.append(["kept", filters["kept"], f"{100 * filters['kept'] / max(tried, 1):.1f} %"])
    slabs = filters["clean_slabs_dropped"]
    rows.append([f"clean slabs dropped: {slabs['rule']}", slabs["count"], ""])
    return table(["filter", "count", "share"], rows)


def _baselines(metadata: Mapping[str, Any]) -> str:
    rows = []
    for split, scores in metadata["baselines"].items():
        cells = [
            f"{scores[name][key] * factor:.{digits}f}"
            for name in ("constant", "composition")
            for key, factor, digits in (("mae", 1, 4), ("ewt", 100, 2))
        ]
        rows.append([split, *cells])
    heading = ["split", "constant MAE (eV)", "EwT (%)", "composition MAE (eV)", "EwT (%)"]
    return table(heading, rows)
