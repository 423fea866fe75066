#!/usr/bin/env python
"""Time to read random batches of OC20's records: flat file and LMDB against `pickle.loads` + PyG.

All ways read the same systems in the same order, in turns, on one thread, from files in the
operating system's cache. Needs torch_geometric.
"""

from __future__ import annotations

import argparse
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch
from torch_geometric.data import Batch, Data

from flt_mol.data import convert, open_dataset

PLAIN = "`pickle.loads` + PyG's collating"
GRAPH = ("edge_index", "cell_offsets")


class Plain:
    """What a user writes who has nothing but PyG; keys are whole numbers."""

    def __init__(self, path: Path) -> None:
        environment = lmdb.open(str(path), subdir=False, readonly=True, lock=False)
        with environment, environment.begin() as transaction:
            self.values = {int(k): v for k, v in transaction.cursor() if k.isdigit()}

    def batch(self, draw: Sequence[int], left_out: Sequence[str] = ()) -> Any:
        """PyG 2 cannot use an object of PyG 1.x, but its dictionary."""
        parts = []
        for key in draw:
            fields = pickle.loads(self.values[key]).__dict__
            kept = {k: v for k, v in fields.items() if v is not None and k not in left_out}
            parts.append(Data.from_dict(kept))
        return Batch.from_data_list(parts)

    def without_graph(self, draw: Sequence[int]) -> Any:
        """The same without the stored graph, of which 97 % of a record consist."""
        return self.batch(draw, GRAPH)


def main() -> None:
    """Convert, then print one row for each way of reading."""
    data = os.environ.get("FLT_MOL_TEST_DATA", "")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "distributed",
        type=Path,
        nargs="?",
        default=Path(data) / "oc20" / "is2re_val_20" / "data.lmdb",
        help="data.lmdb as OC20 distributes it (default: that of $FLT_MOL_TEST_DATA)",
    )
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--cutoff", type=float, default=6.0, help="Å, of the pairs")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "flat.safetensors"
        plain = Plain(given.distributed)  # first: LMDB opens a file once in a process
        distributed = open_dataset(given.distributed)
        size = convert(distributed, path).bytes_per_system
        flat = open_dataset(path)
        pairs = f"with pairs within {given.cutoff:g} Å"
        ways: dict[str, Callable[[Sequence[int]], Any]] = {
            PLAIN: plain.batch,
            "the same, graph dropped before collating": plain.without_graph,
            "distributed LMDB": distributed.batch,
            "flat file": flat.batch,
            f"distributed LMDB, {pairs}": lambda d: distributed.batch(d).with_pairs(given.cutoff),
            f"flat file, {pairs}": lambda d: flat.batch(d).with_pairs(given.cutoff),
        }
        seconds = measure(ways, len(flat), given.batch_size, given.batches, given.rounds)
    print("| way of reading | µs a system | systems/s | times as fast |\n|---|--:|--:|--:|")
    for name, times in seconds.items():
        each = float(np.median(times)) / (given.batch_size * given.batches)
        low, mid, high = np.percentile(np.divide(seconds[PLAIN], times), [25, 50, 75])
        ratio = "1" if name == PLAIN else f"{mid:.1f} ({low:.1f} to {high:.1f})"
        print(f"| {name} | {1e6 * each:.1f} | {1 / each:,.0f} | {ratio} |")
    whole = given.distributed.stat().st_size / len(distributed)
    print(f"\n{whole:,.0f} bytes a system in the LMDB file, {size:,.0f} in the flat file")


def measure(
    ways: dict[str, Callable[[Sequence[int]], Any]],
    count: int,
    size: int,
    batches: int,
    rounds: int,
) -> dict[str, list[float]]:
    """Process seconds of each way in each round; they take turns, after a round to warm up."""
    rng = np.random.default_rng(0)
    draws = [rng.integers(count, size=size).tolist() for _ in range(batches)]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, way in ways.items():
            begun = time.process_time()
            for draw in draws:
                way(draw)
            if round_:
                seconds[name].append(time.process_time() - begun)
    return seconds


if __name__ == "__main__":
    main()
