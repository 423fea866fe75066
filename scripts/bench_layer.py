#!/usr/bin/env python
"""Time and peak memory of an FLT layer over the same layer without RPE, on one thread.

The RPE is computed anew in every call. Memory is what tensors hold at once beyond weights and
input. Times are CPU seconds; ratios are medians over rounds in which the layers take turns, with
their quartiles.
"""

import argparse

from flt_mol.analysis.layer_cost import PARTS, LayerSize, layer_cost
from flt_mol.analysis.tables import markdown_table

HEAD = (
    "layer, tokens, R",
    "forward (s)",
    "ratio",
    "forward + backward (s)",
    "ratio",
    "memory (MB)",
    "ratio",
    "memory, training (MB)",
    "ratio",
)


def main() -> None:
    """Print one row for each part, length and number of frequencies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--frequencies", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--features", type=int, default=64, help="M")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--mode", choices=("linear", "exact"), default="linear")
    parser.add_argument("--feature-map", default="softmax")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    settings = {"mode": given.mode, "feature_map": given.feature_map, "causal": given.causal}
    rows = []
    for part in given.parts:
        for tokens in given.tokens:
            for count in given.frequencies:
                size = LayerSize(
                    tokens=tokens, num_features=given.features, num_frequencies=count, **settings
                )
                cost = layer_cost(size, part, given.rounds)
                row = [f"{part}, {tokens:,}, {count}"]
                for name, ratio in (("forward", cost.forward), ("training", cost.training)):
                    row += [f"{cost.timings.median(name):.3f}", str(ratio)]
                row += [f"{cost.bytes['forward'] / 1e6:.1f}", f"{cost.forward_memory:.3f}"]
                row += [f"{cost.bytes['training'] / 1e6:.1f}", f"{cost.training_memory:.3f}"]
                rows.append(row)
    print(markdown_table(HEAD, rows))


if __name__ == "__main__":
    main()
