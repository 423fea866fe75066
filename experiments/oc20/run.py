"""The paper's comparison on OC20, Performer-12L, FLT-10L and FLT-12L, narrowed to what runs here.

Each model is trained by the paper's own run, `configs/oc20_all_paper-….yaml`, with the changes of
`NARROW`; `--full` trains them unchanged. Further changes are KEY=VALUE, as of `flt-mol train`. A
training that is done is a line of results.jsonl; an interrupted one is resumed when the script is
started again. `--render` only prints the table, `--smoke` tries everything on a few systems.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.figures import curves, save
from common.results import Results, markdown_table, mean_sd
from common.timing import threads
from flt_mol.data.recipes import recipe
from flt_mol.evaluation import evaluate_splits
from flt_mol.models.checkpoint import load_model
from flt_mol.training.config import load_run_config
from flt_mol.training.run import train

FOLDER = Path(__file__).parent
MODELS = {"Performer-12L": "performer-12l", "FLT-10L": "flt-10l", "FLT-12L": "flt-12l"}
PAPER = {"Performer-12L": 0.5454, "FLT-10L": 0.5157, "FLT-12L": 0.5046}  # eV, MAE on val_id
BASELINE = "Performer-12L"
NARROW = [
    "model.embed_dim=32", "model.num_heads=2", "model.ffn_dim=86", "model.recycles=1",
    "loss.recycle_weights=null", "training.batch_size=32", "training.learning_rate=2e-3",
    "training.max_steps=null", "training.warmup_steps=null", "training.num_workers=0",
]  # fmt: skip
SMOKE = [
    "model.embed_dim=8", "model.num_heads=1", "model.ffn_dim=8", "model.num_layers=1",
    "training.max_steps=2", "data.train=val_ood_cat", "data.evaluation=[val_id]",
]  # fmt: skip


def measure(name: str, seed: int, changes: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train one model and evaluate its last weights; its line of results."""
    given = [*changes, f"training.seed={seed}", "training.loggers=[csv]", f"output={folder}"]
    config = load_run_config(f"oc20_all_paper-{MODELS[name]}", given)
    start = time.process_time()
    with threads(1):
        result = train(config, folder.name)
        seconds = time.process_time() - start
        model = load_model(result.folder / "last.ckpt")
        data = recipe(str(config.data.name))
        splits = {split: data.open(split) for split in config.data.evaluation}
        found = evaluate_splits(model, splits, warn=False)
    return {
        "model": name, "data": config.data.name, "seed": seed, "changes": list(changes),
        "parameters": sum(p.numel() for p in model.parameters()), "seconds": round(seconds, 1),
        "splits": {s: {k: r.metrics[k] for k in ("mae", "ewt")} for s, r in found.items()},
    }  # fmt: skip


def table(results: Results, data: str) -> str:
    """MAE ± standard deviation (EwT in %) by split, and the gain over Performer-12L on val_id."""
    lines = {name: results.latest(model=name, data=data) for name in MODELS}
    lines = {name: records for name, records in lines.items() if records}
    splits = list(next(iter(lines.values()))[0]["splits"]) if lines else []
    rows = []
    for name, records in lines.items():
        cells = [_cell([r["splits"][split] for r in records]) for split in splits]
        gains = [f"{100 * (1 - PAPER[name] / PAPER[BASELINE]):.1f}", _gain(lines, name, splits[0])]
        rows.append([name, f"{records[0]['parameters']:,}", len(records), *cells, *gains])
    head = [f"{data}: MAE, eV (EwT, %)", "parameters", "seeds", *splits]
    return markdown_table([*head, "gain in the paper, %", f"gain on {splits[0]}, %"], rows)


def _cell(found: Sequence[dict[str, float]]) -> str:
    return f"{mean_sd([f['mae'] for f in found])} ({100 * fmean(f['ewt'] for f in found):.0f})"


def _gain(lines: dict[str, list[dict[str, Any]]], name: str, split: str) -> str:
    """Mean ± standard deviation over the seeds that both have of 1 − MAE / MAE of the Performer."""
    base = {r["seed"]: r["splits"][split]["mae"] for r in lines.get(BASELINE, [])}
    pairs = [(r["splits"][split]["mae"], base.get(r["seed"])) for r in lines[name]]
    return mean_sd([100 * (1 - mae / other) for mae, other in pairs if other], 1)


def main() -> None:
    """Train what is missing, seed by seed, draw the loss curves, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("changes", nargs="*", metavar="KEY=VALUE", help="settings of the runs")
    add("--data", default="emt_adsorption", help="name of a data set with these splits")
    add("--epochs", type=int, default=4)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--full", action="store_true", help="the paper's own runs, on OC20")
    add("--smoke", action="store_true")
    add("--folder", type=Path, default=Path("runs/oc20"), help="where the runs are kept")
    add("--results", type=Path, default=FOLDER / "results.jsonl")
    add("--render", action="store_true")
    given = parser.parse_args()
    data, seeds = "oc20_is2re" if given.full else given.data, given.seeds
    changes = [f"data.name={data}", "data.train=train", f"training.epochs={given.epochs}", *NARROW]
    changes = [] if given.full else changes
    if given.smoke:
        changes, seeds = [*changes, *SMOKE], seeds[:1]
    results, runs = Results(given.results), {}
    for seed in [] if given.render else seeds:
        for name in MODELS:
            runs[name] = given.folder / f"{data}-{MODELS[name]}-{seed}"
            if not results.read(model=name, data=data, seed=seed):
                record = measure(name, seed, [*changes, *given.changes], runs[name])
                results.append(record)
                print(f"{name}, seed {seed}: {record['splits']}", flush=True)
    if runs and all((run / "logs/csv/metrics.csv").is_file() for run in runs.values()):
        print(save(curves(runs), given.folder / "curves.png"))
    print(f"\n{table(results, data)}")


if __name__ == "__main__":
    main()
