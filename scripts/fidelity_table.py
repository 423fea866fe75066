#!/usr/bin/env python
"""Error of linear attention's outputs against exact softmax with the same mask, as Markdown.

Columns are standard deviations s of the entries of queries and keys and heights f(0) of the mask.
Marked † where leaving the mask out of exact attention would be nearer, ‡ where the plain average
of the values would. A few minutes on one thread, most of it for fitted maps.
"""

import argparse
from pathlib import Path

from flt_mol.analysis.fidelity import Conditions, candidates, fidelity_markdown, fidelity_rows
from flt_mol.analysis.timing import one_thread

SCALES, MAGNITUDES = (0.5, 1.0, 2.0, 4.0), (1.0, 3.0, 5.0)


def main() -> None:
    """Write one file for each head dimension, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "docs/tables")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[16, 64], help="D")
    parser.add_argument("--features", type=int, nargs="+", default=[16, 64, 256], help="M")
    parser.add_argument("--scales", type=float, nargs="+", default=SCALES)
    parser.add_argument("--magnitudes", type=float, nargs="+", default=MAGNITUDES)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--steps", type=int, default=500, help="of the fits")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for head_dim in given.head_dims:
        conditions = [
            Conditions(head_dim, scale, magnitude)
            for scale in given.scales
            for magnitude in given.magnitudes
        ]
        with one_thread():
            table = fidelity_rows(conditions, candidates(given.features), given.draws, given.steps)
        text = fidelity_markdown(table, conditions)
        (given.folder / f"fidelity_D{head_dim}.md").write_text(text + "\n", encoding="utf-8")
        print(f"\nD = {head_dim}\n\n{text}")


if __name__ == "__main__":
    main()
