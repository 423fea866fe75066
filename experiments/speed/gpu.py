"""What the named models cost to train on this machine, on a GPU or a CPU.

Each run of `configs/` takes training steps on real systems with its own loss and optimiser, beside
PyG's SchNet: batch sizes double until memory ends, in each precision, eager and compiled. Every
model runs in a process of its own. The last table extrapolates the fastest way to the whole run.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.results import markdown_table
from common.rivals import SchNetPackaged
from common.timing import process_memory
from flt_mol.data import open_dataset
from flt_mol.data.recipes import recipe
from flt_mol.models import EnergyModel
from flt_mol.training.config import RunConfig, load_run_config
from flt_mol.training.losses import training_loss

DATA = Path(__file__).parents[2] / "datasets" / "emt_adsorption" / "train.lmdb"
RUNS = [
    "oc20_10k_flt-small", "oc20_all_flt-base", "oc20_all_flt-large", "oc20_all_paper-flt-10l",
    "oc20_all_paper-flt-12l", "oc20_all_paper-performer-12l", "oc20_all_graphormer3d-exact",
]  # fmt: skip
SCHNET = "SchNet (PyG), width 1,024, 5 blocks"  # as OC20's IS2RE baseline, but for its cutoff
PRECISIONS = ("fp32", "tf32", "bf16")


def measure(run: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds and bytes of training steps of one model, for all batch sizes and precisions."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config = None if run == SCHNET else load_run_config(run)
    found = []
    for compiled in (False, True) if given.compile else (False,):
        for precision in given.precisions:
            size = 1
            while size <= given.largest:
                point = {"run": run, "precision": precision, "compiled": compiled, "systems": size}
                try:
                    with _precision(precision, device):
                        found.append(point | _steps(config, given, size, compiled, device))
                except torch.OutOfMemoryError:
                    break
                size *= 2
    return found


def _steps(
    config: RunConfig | None,
    given: argparse.Namespace,
    size: int,
    compiled: bool,
    device: torch.device,
) -> dict[str, Any]:
    """Some steps on `size` systems: the median without the first, which warms up or compiles."""
    dataset = open_dataset(given.data, require_energy=True)
    batch = dataset.batch([k % len(dataset) for k in range(size)])
    model: Any = SchNetPackaged(1024, 6.0, 5, 200) if config is None else EnergyModel(config.model)
    if config is not None:
        model.prepare(batch)
        batch = model.prepare_batch(batch)
    else:
        batch = batch.with_pairs(model.cutoff)
    model, batch = model.to(device).train(), batch.to(device)
    weights = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    forward = torch.compile(model, dynamic=True) if compiled else model

    def step() -> None:
        outputs = forward(batch)
        loss = outputs["energy"].square().mean()
        if config is not None:
            loss = training_loss(outputs, batch, 0.0, config.loss, model.normalizers).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    seconds = [_seconds(step, device) for _ in range(given.steps + 1)]
    return {
        "parameters": weights, "atoms": batch.num_atoms, "first": seconds[0],
        "seconds": median(seconds[1:]), "bytes": _memory(device),
    }  # fmt: skip


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _memory(device: torch.device) -> int:
    """Most bytes so far: of the card, or of the process."""
    if device.type == "cpu":
        return (process_memory() or (0, 0))[1]
    most = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return most


@contextlib.contextmanager
def _precision(name: str, device: torch.device) -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    with torch.autocast(device.type, torch.bfloat16, enabled=name == "bf16"):
        yield


def sizes_table(records: list[dict[str, Any]]) -> str:
    """Every measured point."""
    head = ["model", "precision", "", "systems", "atoms", "s/step", "atoms/s", "GB", "first step"]
    return markdown_table(head, [
        [r["run"], r["precision"], "compiled" if r["compiled"] else "eager", r["systems"],
         f"{r['atoms']:,}", f"{r['seconds']:.3g}", f"{r['atoms'] / r['seconds']:,.0f}",
         f"{r['bytes'] / 1e9:.1f}", f"{r['first']:.3g} s"]
        for r in records
    ])  # fmt: skip


def runs_table(records: list[dict[str, Any]]) -> str:
    """The most atoms a second of each model, over SchNet's; and the time of the whole run."""
    best = {r["run"]: r for r in sorted(records, key=lambda r: r["atoms"] / r["seconds"])}
    rows = []
    for run, r in best.items():
        rate, theirs = r["atoms"] / r["seconds"], best.get(SCHNET)
        ratio = "–"
        if theirs is not None:
            ratio = f"{rate / (theirs['atoms'] / theirs['seconds']):.2f}"
        steps, hours = "–", "–"
        if run != SCHNET:
            steps, systems = _whole_run(run)
            hours = f"{systems * r['seconds'] / r['systems'] / 3600:,.1f}"
        how = f"{r['precision']}, {'compiled' if r['compiled'] else 'eager'}, {r['systems']}"
        cells = [run, f"{r['parameters']:,}", how, f"{rate:,.0f}", ratio, steps, hours]
        rows.append(cells)
    head = ["model", "parameters", "best at", "atoms/s", "over SchNet", "steps", "whole run (h)"]
    return markdown_table(head, rows)


def _whole_run(run: str) -> tuple[str, int]:
    """Number of steps of a run, as text, and the systems they see."""
    config = load_run_config(run)
    training = config.training
    count = recipe(str(config.data.name)).metadata["splits"][config.data.train]["count"]
    steps = training.epochs * math.ceil(count / training.batch_size)
    if training.max_steps is not None:
        steps = min(steps, training.max_steps)
    return f"{steps:,}", steps * training.batch_size


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="systems with targets")
    parser.add_argument("--runs", nargs="+", default=[*RUNS, SCHNET])
    known = PRECISIONS if torch.cuda.is_available() else ("fp32", "bf16")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(known))
    parser.add_argument("--largest", type=int, default=1024, help="systems of a batch")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    given = parser.parse_args()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"{name}, torch {torch.__version__}, data {given.data.name}", flush=True)
    records: list[dict[str, Any]] = []
    for run in given.runs:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            records += pool.submit(measure, run, given).result()
        print(f"{run}: done", flush=True)
    print(f"\n{sizes_table(records)}\n\n{runs_table(records)}")


if __name__ == "__main__":
    main()
