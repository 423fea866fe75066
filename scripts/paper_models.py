#!/usr/bin/env python
"""Train the named models for some steps on real OC20 systems, each by its own run in configs/.

Prints parameters, peak memory, seconds a step, and how long the whole run would take on this
device. Every model runs in a process of its own. Systems are repeated if a batch has more.
"""

import argparse
from pathlib import Path

from flt_mol.analysis.paper_models import (
    HEAD,
    costs_apart,
    device_name,
    named_models,
    row,
    run_of,
)
from flt_mol.analysis.tables import markdown_table


def main() -> None:
    """Print a line when each model is done, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="systems with targets, such as is2re_val_20")
    parser.add_argument("--models", nargs="+", default=named_models(), choices=named_models())
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, help="systems; default: the run's own")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the run")
    given = parser.parse_args()
    runs = [run_of(model) for model in given.models]
    rows = []
    for cost in costs_apart(runs, given.data, given.steps, given.batch_size, given.set):
        rows.append(row(cost))
        print(f"{cost.run}: {cost.seconds_per_step:.3g} s/step", flush=True)
    print(f"\n{device_name()}; {given.steps} step(s)\n")
    print(markdown_table(HEAD, rows))


if __name__ == "__main__":
    main()
