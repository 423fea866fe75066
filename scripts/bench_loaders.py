#!/usr/bin/env python
"""Systems per second from OC20's distributed LMDB and from the compact format, on one thread.

Each way reads the same random batches; ratios are to `pickle.loads` of the records and PyG's
collating, formed round by round (medians with quartiles). Needs torch_geometric for that.
"""

import argparse
import tempfile
from pathlib import Path

from flt_mol.analysis.loading_cost import PLAIN, loading_cost
from flt_mol.analysis.tables import markdown_table
from flt_mol.data import convert, open_dataset


def main() -> None:
    """Convert, then print one row for each way of reading."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("distributed", type=Path, help="data.lmdb as OC20 distributes it")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--cutoff", type=float, default=6.0, help="Å, of the pairs")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compact = Path(folder) / "compact.lmdb"
        convert(open_dataset(given.distributed), compact, workers=1)
        sizes = [path.stat().st_size for path in (given.distributed, compact)]
        cost = loading_cost(
            given.distributed,
            compact,
            batch_size=given.batch_size,
            batches=given.batches,
            cutoff=given.cutoff,
            rounds=given.rounds,
        )
        count = len(open_dataset(compact))
    rows = []
    for name in cost.timings.seconds:
        speed = cost.per_second(name)
        times = "1" if name == PLAIN else str(cost.speedup(name))
        rows.append([name, f"{1e6 / speed:.0f}", f"{speed:,.0f}", times])
    head = ("way of reading", "µs a system", "systems/s", "times as fast")
    print(markdown_table(head, rows))
    print(f"\n{sizes[0] / count:,.0f} and {sizes[1] / count:,.0f} bytes a system in the files")


if __name__ == "__main__":
    main()
