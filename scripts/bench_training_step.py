#!/usr/bin/env python
"""Time and memory of a training step of whole models on slabs, with periodic images.

Models take turns in one process. SchNet needs torch_geometric, and is left out without it; the
dense 3D-Graphormer gets fewer slabs (--dense-slabs), since it holds all features of all pairs.
"""

import argparse

from flt_mol.analysis.speed.command import add_options, run
from flt_mol.analysis.speed.figures import draw_training_step
from flt_mol.analysis.speed.model_tables import training_step_tables
from flt_mol.analysis.speed.training_step import MODELS, Shape


def main() -> None:
    """Measure one step of each model, or render what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), help="default: all")
    add("--slabs", type=int, default=32)
    add("--dense-slabs", type=int, default=8)
    add("--layers", type=int, help="of atoms in a slab, for a try")
    add("--width", type=int, default=Shape().width)
    add("--heads", type=int, default=Shape().heads)
    add("--blocks", type=int, default=Shape().blocks)
    add("--ffn", type=int, default=Shape().ffn)
    add("--cutoff", type=float, default=Shape().cutoff, help="Å")
    add("--rounds", type=int, default=5)
    add_options(parser, "training_step")
    given = parser.parse_args()
    shape = Shape(given.width, given.heads, given.blocks, given.ffn, given.cutoff)
    point = {
        "names": given.models,
        "num_slabs": given.slabs,
        "dense_slabs": given.dense_slabs,
        "layers": given.layers,
        "shape": shape._asdict(),
        "rounds": given.rounds,
    }
    run("training_step", given, [point], training_step_tables, draw_training_step)


if __name__ == "__main__":
    main()
