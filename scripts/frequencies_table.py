#!/usr/bin/env python
"""Errors of sampled masks: the largest over a range of distances, and what rotations change.

The mask is exp(−‖x‖²/2σ²), so that errors are in units of f(0). Random kinds are medians over
draws.
"""

import argparse

from flt_mol.analysis.masks import deterministic_sets, random_sets
from flt_mol.analysis.tables import markdown_table


def main() -> None:
    """Print a table for each width of the mask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sigma", type=float, nargs="+", default=[2.0, 4.0], help="of f, Å")
    parser.add_argument("--counts", type=int, nargs="+", default=[16, 64, 256, 1024], help="R")
    parser.add_argument("--radius", type=float, default=18.0, help="Å")
    parser.add_argument("--draws", type=int, default=8)
    given = parser.parse_args()
    cutoffs = [(2.5, 0.5), (3.0, 1.0), (4.2, 4.0)]
    for sigma in given.sigma:
        found = [
            *random_sets(sigma, given.counts, given.radius, given.draws),
            *deterministic_sets(sigma, given.radius, cutoffs),
        ]
        kinds = dict.fromkeys(result.kind for result in found)
        rows = [
            (kind, r.num_frequencies, f"{r.error:.2g}", f"{r.rotation:.2g}")
            for kind in kinds
            for r in found
            if r.kind == kind
        ]
        print(f"\nσ = {sigma:g} Å, distances up to {given.radius:g} Å\n")
        print(markdown_table(("frequencies", "R", "error / f(0)", "rotation / f(0)"), rows))


if __name__ == "__main__":
    main()
