#!/usr/bin/env python
"""Trainings killed (SIGKILL) at random moments: do they go on to the weights of an undisturbed one?

Exits with 1 on any difference, in a bit of a weight or in a metric.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from flt_mol.testing.killing_train import kill_trainings, short_run


def main() -> int:
    """Print one line for each training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-minutes", type=float, default=0.0, help="0: a point at every step")
    parser.add_argument("--epochs", type=int, default=4)
    given = parser.parse_args()
    kills = different = 0
    print("| killed after (s) | of (s) | steps kept | same |")
    print("|:--|--:|:--|:--|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = short_run(
            folder,
            epochs=given.epochs,
            save_minutes=given.save_minutes,
            ema_decay=0.9,
            accumulate=2,
            noise=0.02,
        )
        for row in kill_trainings(config, folder, kills=given.kills, seed=given.seed):
            kills += len(row.seconds)
            different += len(row.seconds) * (not row.identical)
            seconds = ", ".join(f"{s:.2f}" for s in row.seconds)
            steps = ", ".join("-" if s is None else str(s) for s in row.steps)
            same = "yes" if row.identical else f"NO: {', '.join(row.differing)}"
            print(f"| {seconds} | {row.of:.2f} | {steps} | {same} |", flush=True)
    print(f"\n{kills} kills, {kills - different} of {kills} bit-identical to an undisturbed run")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
