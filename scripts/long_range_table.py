#!/usr/bin/env python
"""Energies of random charges, by pairs alone and with a global part beside: train, and print.

Each model that is done is a line in the results file, so the script may be stopped and started
again. All of it takes about nine minutes on one thread.
"""

import argparse
from pathlib import Path

from flt_mol.analysis.accuracy.long_range import LONG_RANGE_ROWS, experiments, long_range_page
from flt_mol.analysis.accuracy.report import told
from flt_mol.analysis.accuracy.results import Results
from flt_mol.analysis.accuracy.runs import missing, run

FOLDER = Path(__file__).parents[1] / "docs/tables"


def main() -> None:
    """Train what is missing, write the table and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--rows", nargs="+", choices=list(LONG_RANGE_ROWS), default=list(LONG_RANGE_ROWS))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--epochs", type=int, default=20)
    add("--train", type=int, help="systems to train on, for a try")
    add("--test", type=int, help="systems to evaluate on, for a try")
    add("--jobs", type=int, default=1, help="processes, each on one thread")
    add("--results", type=Path, default=FOLDER / "long_range.jsonl")
    add("--render", type=Path, nargs="?", const=FOLDER / "long_range.md", help="only write a file")
    given = parser.parse_args()
    results = Results(given.results)
    every = experiments(given.epochs, given.train, given.test)
    for label, experiment in every.items() if given.render is None else ():
        todo = missing(experiment, results, given.rows, given.seeds)
        for job, found in run(experiment, results, todo, given.jobs):
            print(f"{label}, {job.row}, seed {job.seed}: {told(found)}", flush=True)
    text = long_range_page(every, results, given.rows)
    print(f"\n{text}")
    if given.render is not None:
        given.render.parent.mkdir(parents=True, exist_ok=True)
        given.render.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
