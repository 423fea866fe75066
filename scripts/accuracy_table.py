#!/usr/bin/env python
"""Train the models of the accuracy table that have no result yet, and print the table.

Each (row, seed) that is done is a line in the results file: the script may be stopped at any time,
started again, and run several times at once with other rows or seeds. With --times nothing is
trained: the rows take turns at steps of training, in one process on one thread, and how long they
took is a line of its own in the results file, which the table then shows. With --render nothing is
trained either, and tables of all targets and epochs are written to a file,
docs/tables/accuracy.md if none is named.
"""

import argparse
from pathlib import Path

from flt_mol.analysis.accuracy.loop import TARGETS, Settings
from flt_mol.analysis.accuracy.report import page, report, told
from flt_mol.analysis.accuracy.results import Results
from flt_mol.analysis.accuracy.rows import ROWS
from flt_mol.analysis.accuracy.runs import Experiment, Recipe, missing, run, usable
from flt_mol.analysis.accuracy.times import measure_times

FOLDER = Path(__file__).parents[1] / "docs/tables"


def main() -> None:
    """Train what is missing, print what there is, and write it with --render."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    add("--epochs", type=int, default=Settings.epochs)
    add("--targets", choices=list(TARGETS), default="joint")
    add("--data", default="emt_adsorption", help="name or folder of a data set")
    add("--limit", type=int, help="systems of each split, for a try")
    add("--jobs", type=int, default=1, help="processes, each on one thread")
    add("--results", type=Path, default=FOLDER / "accuracy.jsonl")
    add("--times", type=int, nargs="?", const=7, metavar="ROUNDS", help="only take times")
    add("--render", type=Path, nargs="?", const=FOLDER / "accuracy.md", help="only write a file")
    given = parser.parse_args()
    settings = Settings(given.targets, given.epochs)
    experiment = Experiment(ROWS, settings, Recipe(given.data, given.limit))
    results = Results(given.results)
    rows, reasons = usable(experiment, given.rows)
    for name, reason in reasons.items():
        print(f"{name}: left out, {reason}")
    if given.render is not None and reasons:
        raise SystemExit(f"{given.render} is left as it is: it would lose {', '.join(reasons)}")
    if given.times is not None:
        results.append(measure_times(experiment, rows, given.times))
    elif given.render is None:
        todo = missing(experiment, results, rows, given.seeds)
        print(f"{len(todo)} of {len(rows) * len(given.seeds)} models to train", flush=True)
        for job, found in run(experiment, results, todo, given.jobs):
            print(f"{job.row}, seed {job.seed}: {told(found)}", flush=True)
    text = (page if given.render is None else report)(experiment, results, rows)
    print(f"\n{text}")
    if given.render is not None:
        given.render.parent.mkdir(parents=True, exist_ok=True)
        given.render.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
