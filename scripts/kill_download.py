#!/usr/bin/env python
"""Downloads killed (SIGKILL) at random moments and run again: are the files the same ever after?

From a server on this machine that is slow and cuts connections. Exits with 1 on any difference.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from flt_mol.analysis.tables import markdown_table
from flt_mol.testing.killing import kill_downloads


def main() -> int:
    """Print one line for each kill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=2**23, help="bytes of each of six files")
    parser.add_argument("--rate", type=float, default=6e6, help="of the server, bytes per second")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = kill_downloads(
            Path(folder), kills=given.kills, seed=given.seed, size=given.size, rate=given.rate
        )
    lines = [
        [f"{row.seconds:.3f}", row.left, f"{row.received:,}", "yes" if row.identical else "NO"]
        for row in rows
    ]
    print(markdown_table(["killed after (s)", "left behind", "bytes then fetched", "same"], lines))
    different = sum(not row.identical for row in rows)
    print(f"\n{len(rows)} kills, {different} results that differ from an undisturbed download")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
