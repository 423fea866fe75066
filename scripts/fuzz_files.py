#!/usr/bin/env python
"""Read damaged, foreign and hostile files of every kind, and count what happened.

Each file is read by another process with 3 GB of memory and 20 seconds. It must end in records
or in a ValueError that names the file; a file that gives fewer or more records than the sound one
must warn. Anything else is a fault, listed with the command that repeats it; the exit status is 1
if there is one.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fuzzing.cases import Case, choose
from fuzzing.run import FAULT, run, table


def _case(text: str) -> Case:
    kind, mutation, seed = text.split(":")
    return Case(kind, mutation, int(seed))


def main() -> int:
    """Print a table, and the faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=_case, nargs="+", help="only these: KIND:MUTATION:SEED")
    parser.add_argument("--keep", type=Path, help="folder that gets the files of faults")
    given = parser.parse_args()
    begin = time.monotonic()
    outcomes = []
    for outcome in run(given.case or choose(given.count, given.seed), given.keep):
        outcomes.append(outcome)
        if outcome.verdict == FAULT:
            print(f"FAULT {outcome.reason}\n  python scripts/fuzz_files.py --case '{outcome.case}'")
        elif given.case:
            print(f"{outcome.case}: {outcome.verdict}")
    print(table(outcomes))
    faults = sum(outcome.verdict == FAULT for outcome in outcomes)
    print(f"{len(outcomes)} files, {faults} faults, {time.monotonic() - begin:.0f} s")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
