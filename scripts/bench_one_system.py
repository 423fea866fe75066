#!/usr/bin/env python
"""One periodic crystal of a thousand to a million atoms: time, memory, and how they grow.

Each size and pass is a process of its own, which is refused memory beyond --limit-gb: a point that
needs more is a line that says so, and so are the larger ones, which are not tried.
"""

import argparse

from flt_mol.analysis.speed.command import add_options, run
from flt_mol.analysis.speed.figures import draw_one_system
from flt_mol.analysis.speed.lengths import PASSES
from flt_mol.analysis.speed.model_tables import one_system_tables
from flt_mol.analysis.speed.one_system import WHAT


def main() -> None:
    """Measure all sizes, or render what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    sizes = [1000, 4000, 16000, 64000, 100000, 250000, 1000000]
    add("--atoms", type=int, nargs="+", default=sizes)
    add("--what", nargs="+", choices=WHAT, default=["model", "attention"])
    add("--passes", nargs="+", choices=PASSES, default=PASSES)
    add("--width", type=int, default=64)
    add("--blocks", type=int, default=2)
    add("--cutoff", type=float, default=4.0, help="Å, of the pair filter")
    add("--max-vectors", type=int, default=256, help="waves of a system; 0 for all: quadratic")
    add("--rounds", type=int, default=3)
    add_options(parser, "one_system")
    given = parser.parse_args()
    shared = {
        "width": given.width,
        "blocks": given.blocks,
        "cutoff": given.cutoff,
        "max_vectors": given.max_vectors or None,
        "rounds": given.rounds,
    }
    points = [
        {"what": what, "atoms": atoms, "passes": passes, **shared}
        for what in given.what
        for passes in given.passes
        for atoms in sorted(given.atoms)
    ]
    run("one_system", given, points, one_system_tables, draw_one_system, size="atoms")


if __name__ == "__main__":
    main()
