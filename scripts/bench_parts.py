#!/usr/bin/env python
"""The parts of a block on a batch of slabs, each against its floors: a roofline.

Floors are counted, from the sizes of all matrix products, and turned into time by the rates of a
large product and a large copy that took turns with the parts. What is made once for all blocks,
bases of pairs and waves, is made beforehand.
"""

import argparse

from flt_mol.analysis.speed.command import add_options, run
from flt_mol.analysis.speed.figures import draw_nothing
from flt_mol.analysis.speed.lengths import PASSES
from flt_mol.analysis.speed.model_tables import parts_tables
from flt_mol.analysis.speed.training_step import Shape


def main() -> None:
    """Measure all parts, or render what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--passes", nargs="+", choices=PASSES, default=PASSES)
    add("--slabs", type=int, default=32)
    add("--layers", type=int, help="of atoms in a slab, for a try")
    add("--width", type=int, default=Shape().width)
    add("--heads", type=int, default=Shape().heads)
    add("--ffn", type=int, default=Shape().ffn)
    add("--cutoff", type=float, default=Shape().cutoff, help="Å")
    add("--rounds", type=int, default=7)
    add("--gemm-size", type=int, default=2048, help="of the product that shows the machine's rate")
    add_options(parser, "parts")
    given = parser.parse_args()
    shape = Shape(given.width, given.heads, ffn=given.ffn, cutoff=given.cutoff)
    shared = {"num_slabs": given.slabs, "layers": given.layers, "shape": shape._asdict()}
    shared |= {"rounds": given.rounds, "gemm_size": given.gemm_size}
    points = [{"passes": passes, **shared} for passes in given.passes]
    run("parts", given, points, parts_tables, draw_nothing)


if __name__ == "__main__":
    main()
