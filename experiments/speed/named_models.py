"""What the named models cost to train: parameters, memory, seconds a step, time of the whole run.

Each run in `configs/` takes some steps on real systems (repeated if there are too few), with its
batch size, loss and optimiser, in a process of its own.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.results import markdown_table
from common.timing import process_memory
from flt_mol.data import open_dataset
from flt_mol.data.recipes import recipe
from flt_mol.models import EnergyModel
from flt_mol.structures import Structures
from flt_mol.training.config import load_run_config
from flt_mol.training.losses import training_loss

RUNS = [
    "oc20_10k_flt-small", "oc20_all_flt-base", "oc20_all_flt-large", "oc20_all_paper-flt-10l",
    "oc20_all_paper-flt-12l", "oc20_all_paper-performer-12l", "oc20_all_graphormer3d-exact",
]  # fmt: skip


def measure(run: str, data: str, steps: int, batch_size: int | None) -> list[str]:
    """Train some steps; a row of the table."""
    config = load_run_config(run)
    training = config.training
    size = batch_size or training.batch_size
    dataset = open_dataset(data, require_energy=True)
    rows = [k % len(dataset) for k in range(size)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = EnergyModel(config.model).to(device).train()
    batch: Structures = dataset.batch(rows)
    if model.cutoff is not None:
        batch = batch.with_pairs(model.cutoff)
    batch = batch.to(device)
    model.prepare(batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate)
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
        outputs = model(batch)
        loss = training_loss(outputs, batch, step / steps, config.loss, model.normalizers)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    count = recipe(str(config.data.name)).metadata["splits"][config.data.train]["count"]
    total = training.epochs * math.ceil(count / training.batch_size)
    total = total if training.max_steps is None else min(total, training.max_steps)
    step_time = median(seconds[1:] or seconds)
    memory = (
        torch.cuda.max_memory_allocated()
        if device.type == "cuda"
        else (process_memory() or (0, 0))[1]
    )
    days = total * step_time * training.batch_size / size / 86400
    return [
        run, f"{sum(p.numel() for p in model.parameters()):,}", device.type,
        f"{size}, {batch.num_atoms:,}", f"{step_time:.3g}", f"{memory / 1e9:.1f}", f"{total:,}",
        f"{days:.1f} days",
    ]  # fmt: skip


def main() -> None:
    """Print a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="systems with targets, such as OC20's val_id/data.lmdb")
    parser.add_argument("--runs", nargs="+", default=RUNS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, help="systems; default: the run's own")
    given = parser.parse_args()
    rows = []
    for run in given.runs:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            job = pool.submit(measure, run, given.data, given.steps, given.batch_size)
            rows.append(job.result())
        print(f"{run}: {rows[-1][4]} s/step", flush=True)
    head = [
        "run",
        "parameters",
        "device",
        "systems, atoms a step",
        "s/step",
        "memory (GB)",
        "steps",
        "whole run",
    ]
    print(markdown_table(head, rows))


if __name__ == "__main__":
    main()
