#!/usr/bin/env python
"""Conversions killed (SIGKILL) at random moments and run again: is the file the same ever after?

From some hundred records made like OC20's, or from PATH. Exits with 1 on any difference.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from flt_mol.testing.killing_convert import kill_conversions, write_records


def main() -> int:
    """Print one line for each kill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, nargs="?", help="records to convert")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=int, default=500, help="made where PATH is not given")
    parser.add_argument("--suffix", default=".lmdb", help="or .aselmdb, .extxyz")
    given = parser.parse_args()
    different = 0
    print("| killed after (s) | of (s) | workers | chunks kept | same |")
    print("|--:|--:|--:|--:|:--|")
    with tempfile.TemporaryDirectory() as name:
        folder, source = Path(name), given.path
        if source is None:
            source = folder / "source.lmdb"
            write_records(source, given.records)
        for row in kill_conversions(
            source, folder, kills=given.kills, seed=given.seed, suffix=given.suffix
        ):
            different += not row.identical
            same = "yes" if row.identical else "NO"
            print(
                f"| {row.seconds:.2f} | {row.of:.2f} | {row.workers} | {row.kept} | {same} |",
                flush=True,
            )
    print(f"\n{given.kills} kills, {different} results that differ from an undisturbed run")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
