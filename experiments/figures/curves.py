"""Loss curves of runs of `flt-mol train`, from their logs: the paper's OC20 figure.

`python experiments/figures/curves.py LABEL=runs/a LABEL=runs/b LABEL=runs/c --out curves.png`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.figures import curves, save


def main() -> None:
    """Draw the runs that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]FOLDER", help="of flt-mol train")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    given = parser.parse_args()
    named = [run.rpartition("=") for run in given.runs]
    runs = {label or Path(folder).name: Path(folder) for label, _, folder in named}
    print(save(curves(runs), given.out))


if __name__ == "__main__":
    main()
