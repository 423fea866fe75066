#!/usr/bin/env python
"""Time and memory of one layer over lengths: ours, other packages', and what they replace.

Each length and pass is a process of its own, in which all layers take turns with the layer's bare
matrix products. Packages that are not installed are left out:
pip install --no-deps performer-pytorch==1.1.4 einops local-attention axial-positional-embedding
hyper-connections torch-einops-utils; pip install torch_geometric.
"""

import argparse

from flt_mol.analysis.speed.command import add_options, run
from flt_mol.analysis.speed.figures import draw_lengths
from flt_mol.analysis.speed.layers import LAYERS
from flt_mol.analysis.speed.lengths import PARTS, PASSES
from flt_mol.analysis.speed.tables import lengths_tables


def main() -> None:
    """Measure all lengths, parts and passes, or render what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[2**n for n in range(7, 14)])
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="whole layers, attention alone")
    add("--passes", nargs="+", choices=PASSES, default=PASSES)
    add("--layers", nargs="+", choices=list(LAYERS), help="default: all")
    add("--embed-dim", type=int, default=768)
    add("--heads", type=int, default=12)
    add("--ffn", type=int, default=3072)
    add("--features", type=int, default=64, help="M")
    add("--frequencies", type=int, default=32, help="R")
    add("--rounds", type=int, default=7)
    add("--gemm-size", type=int, default=2048, help="of the product that shows the machine's rate")
    add_options(parser, "lengths")
    given = parser.parse_args()
    size = {
        "embed_dim": given.embed_dim,
        "num_heads": given.heads,
        "ffn_dim": given.ffn,
        "num_features": given.features,
        "num_frequencies": given.frequencies,
    }
    shared = {"names": given.layers, "size": size, "rounds": given.rounds}
    points = [
        {"tokens": n, "part": part, "passes": passes, **shared, "gemm_size": given.gemm_size}
        for n in given.tokens
        for part in given.parts
        for passes in given.passes
    ]
    run("lengths", given, points, lengths_tables, draw_lengths)


if __name__ == "__main__":
    main()
