#!/usr/bin/env python
"""Train the named models for some steps on real OC20 systems, each by its own run in configs/.

Prints parameters, peak memory, seconds a step, and how long the whole run would take on this
device. Every model runs in a process of its own. Systems are repeated if there are too few.
"""

import argparse
from pathlib import Path

from flt_mol.analysis.paper_models import (
    HEAD,
    costs_apart,
    named_models,
    notes,
    row,
    run_of,
    runs,
)
from flt_mol.analysis.tables import markdown_table

DATA = "systems with targets, such as val_id/data.lmdb from `flt-mol data download oc20-is2re`"
RUNS = "names in configs/, such as oc20_10k_flt-base"
MODELS = "of each the run on the largest part of OC20 there is one for; default: all"


def main() -> None:
    """Print a line when each run is done, then the table and what it means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help=DATA)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--runs", nargs="+", choices=runs(), metavar="RUN", help=RUNS)
    which.add_argument("--models", nargs="+", choices=named_models(), metavar="MODEL", help=MODELS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, help="systems; default: the run's own")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the run")
    given = parser.parse_args()
    names = given.runs or [run_of(model) for model in given.models or named_models()]
    costs = []
    for cost in costs_apart(names, given.data, given.steps, given.batch_size, given.set):
        costs.append(cost)
        first, last = cost.losses[0], cost.losses[-1]
        done = f"{cost.seconds_per_step:.3g} s/step, loss {first:.3f} → {last:.3f}"
        print(f"{cost.run}: {done} in {given.steps} step(s)", flush=True)
    print()
    print(markdown_table(HEAD, map(row, costs)))
    print("\n" + "\n".join(notes(costs, given.set)))


if __name__ == "__main__":
    main()
