"""`python -m helpers.wide_training` is `flt-mol`, but trains in float64."""

import sys
from dataclasses import replace

from flt_mol.cli import main
from flt_mol.training import run
from flt_mol.training.task import EnergyTask

build_model = run.build_model


def widened(task, batch, device, dataloader_idx):
    if isinstance(batch, tuple):  # with what its step holds, in training
        return widened(task, batch[0], device, dataloader_idx), batch[1]
    moved = batch.moved(batch.positions.double())
    return replace(moved, cell=batch.cell.double(), forces=batch.forces)


if __name__ == "__main__":
    run.build_model = lambda *arguments: build_model(*arguments).double()
    EnergyTask.transfer_batch_to_device = widened
    sys.exit(main())
