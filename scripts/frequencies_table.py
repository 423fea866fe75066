#!/usr/bin/env python
"""Errors of sampled masks: the largest over a range of distances, and what rotations change.

The mask is exp(−‖x‖²/2σ²), so errors are in units of f(0). Random kinds are medians over draws,
shown as "error, rotation" for each R.
"""

import argparse

from flt_mol.analysis.masks import deterministic_sets, random_sets
from flt_mol.analysis.tables import markdown_table


def main() -> None:
    """Print two tables for each width of the mask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sigma", type=float, nargs="+", default=[2.0, 4.0], help="of f, Å")
    parser.add_argument("--counts", type=int, nargs="+", default=[16, 64, 256, 1024], help="R")
    parser.add_argument("--radius", type=float, default=18.0, help="Å")
    parser.add_argument("--draws", type=int, default=8)
    given = parser.parse_args()
    for sigma in given.sigma:
        print(f"\nσ = {sigma:g} Å, distances up to {given.radius:g} Å\n")
        cells: dict[str, list[str]] = {}
        for r in random_sets(sigma, given.counts, given.radius, given.draws):
            cells.setdefault(r.kind, []).append(f"{r.error:.2f}, {r.rotation:.2f}")
        head = ["random, error and rotation", *(f"R = {count:,}" for count in given.counts)]
        print(markdown_table(head, ([kind, *row] for kind, row in cells.items())), end="\n\n")
        found = deterministic_sets(sigma, given.radius, [(2.5, 0.5), (3.0, 1.0), (4.2, 4.0)])
        rows = ((r.kind, r.num_frequencies, f"{r.error:.1e}", f"{r.rotation:.1e}") for r in found)
        print(markdown_table(("deterministic", "R", "error", "rotation"), rows))


if __name__ == "__main__":
    main()
