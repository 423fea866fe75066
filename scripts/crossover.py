#!/usr/bin/env python
"""Time of exact over time of linear attention by size of system, and where they cross.

Batches of equal systems with about 4,096 rows in all, on one thread; CPU seconds, medians of the
ratios of rounds in which the modes take turns. With --check, the time of mode "auto" over the
better of the two instead, and the worst of that.
"""

import argparse

from flt_mol.analysis.crossover import PARTS, PASSES, AttentionShape, column
from flt_mol.analysis.tables import markdown_table


def main() -> None:
    """Print one column for each shape, part and pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2**n for n in range(4, 13)])
    parser.add_argument("--shapes", nargs="+", default=["64,64", "16,64", "64,128"], metavar="D,M")
    parser.add_argument("--embed-dim", type=int, default=256, help="C, for H = C/D heads")
    parser.add_argument("--frequencies", type=int, default=16, help="R, 0 for no positions")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--exact-below", type=int, help="with --check; default: the layer's own")
    given = parser.parse_args()
    columns = {}
    for part in given.parts:
        for passes in given.passes:
            for pair in given.shapes:
                d, m = map(int, pair.split(","))
                shape = AttentionShape(
                    d, m, given.embed_dim, given.frequencies, causal=given.causal
                )
                ratios, summary = column(
                    shape,
                    given.sizes,
                    part,
                    passes,
                    check=given.check,
                    exact_below=given.exact_below,
                    rounds=given.rounds,
                )
                cells = [f"{ratio:.2f}" for ratio in ratios]
                cells.append(f"{summary:.2f}" if given.check else f"{summary:.0f}")
                columns[f"{part}, {passes}, D = {d}, M = {m}"] = cells
    last = "worst" if given.check else "equal at"
    labels = [*(f"{size:,}" for size in given.sizes), last]
    print(markdown_table(["size", *columns], zip(labels, *columns.values(), strict=True)))


if __name__ == "__main__":
    main()
