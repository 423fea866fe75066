"""`flt-mol`, with the trained weights of each process in a file beside the run's folder."""

import sys
from pathlib import Path

import torch

from flt_mol.cli import main
from flt_mol.training import run

fit = run._fit


def fit_and_dump(model, config, splits, history, world):
    fit(model, config, splits, history, world)
    torch.save(model.state_dict(), Path(history.folder).parent / f"weights-{world.rank}.pt")


run._fit = fit_and_dump

if __name__ == "__main__":
    sys.exit(main())
