"""Classify images with FLT and other linear attentions; train what is missing, print the table.

Each model that is done is a line in results.jsonl, so that a run that was stopped resumes.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import yaml
from torch import nn

from common.loop import seeded
from common.results import Results, markdown_table, mean_sd
from common.timing import threads
from images.data import Images, digits, fashion_mnist, stripes
from images.model import Config, ImageTransformer

RELATIVE = {"absolute": False}  # no position vectors
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flt": ("FLT, Gaussian mixture", "flt", {}),
    "performer": ("Performer, learned ReLU", "performer", {}),
    "flt_relative": ("FLT, relative positions only", "flt", RELATIVE),
    "performer_bag": ("Performer, no positions", "performer", RELATIVE),
    "cosformer": ("cosFormer", "cosformer", {}),
    "log_linear": ("log-linear, learned ReLU", "log_linear", {}),
    "performer_wide": ("Performer of FLT's size", "performer", {"hidden": 256}),
}


def train(config: Config, kind: str, images: Images, seed: int) -> tuple[ImageTransformer, float]:
    """AdamW, a warm-up and a cosine decay; the model and CPU seconds per 1,000 images."""
    generator = torch.Generator().manual_seed(seed)
    model = ImageTransformer(config, kind, generator).to(images.pixels.device).train()
    rate, per_epoch = config.learning_rate, len(images.pixels) // config.batch
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=config.epochs * per_epoch, pct_start=0.2
    )
    start = time.process_time()
    for _ in range(config.epochs):
        order = torch.randperm(len(images.pixels), generator=generator)
        for rows in order[: per_epoch * config.batch].view(per_epoch, -1):
            loss = nn.functional.cross_entropy(model(images.pixels[rows]), images.classes[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    seen = config.epochs * per_epoch * config.batch
    return model, 1e3 * (time.process_time() - start) / seen


@torch.no_grad()
def accuracy(model: ImageTransformer, images: Images) -> float:
    """Percent of images whose class is the one with the largest logit."""
    model.eval()
    found = torch.cat([model(pixels).argmax(-1) for pixels in images.pixels.split(64)])
    return 100 * (found == images.classes).double().mean().item()


def measure(config: Config, row: str, seed: int, data: tuple[Images, Images]) -> dict[str, Any]:
    """Train and test one model; what its line of results has beside the names."""
    _, kind, changes = ROWS[row]
    limits = config.train_images, config.test_images
    used, test = (Images(x[:n], y[:n]) for (x, y), n in zip(data, limits, strict=True))
    with seeded(seed), threads(1):
        model, seconds = train(replace(config, **changes), kind, used, seed)
        found = accuracy(model, test)
    weights = sum(p.numel() for p in model.parameters())
    return {"accuracy": round(found, 3), "seconds": round(seconds, 3), "weights": weights}


def table(results: Results, **values: Any) -> str:
    """Accuracy and time of every row that has results, and FLT less Performer, seed by seed."""
    found = {row: results.latest(row=row, **values) for row in ROWS}
    cells = [
        [
            ROWS[row][0], mean_sd((line["accuracy"] for line in lines), 2), len(lines),
            f"{fmean(line['seconds'] for line in lines):.2f}", f"{lines[0]['weights']:,}",
        ]
        for row, lines in found.items() if lines
    ]  # fmt: skip
    head = ["attention", "accuracy (%)", "seeds", "CPU s per 1,000 images", "weights"]
    text = markdown_table(head, cells)
    for one, other in (
        ("flt", "performer"), ("flt", "performer_wide"), ("flt_relative", "performer_bag"),
    ):  # fmt: skip
        pairs = [(a, b) for a in found[one] for b in found[other] if a["seed"] == b["seed"]]
        apart = [a["accuracy"] - b["accuracy"] for a, b in pairs]
        if len(apart) > 1:
            text += f"\n\n{ROWS[one][0]}, less {ROWS[other][0]}, seed by seed: "
            text += f"{fmean(apart):+.2f} ± {stdev(apart):.2f}."
    return text


def main() -> None:
    """Parse the command line, train what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add, here = parser.add_argument, Path(__file__).parent
    add("--data", type=Path, help="folder with Fashion-MNIST's idx files; default: digits")
    add("--config", type=Path, help="yaml of the model and its training; default: reduced")
    add("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--results", type=Path, default=here / "results.jsonl")
    add("--render", action="store_true", help="only print the table, of Fashion-MNIST")
    add("--device", default="cpu", help="where models train, e.g. cuda")
    add("--smoke", action="store_true", help="small models on drawn stripes")
    given = parser.parse_args()
    config = Config(**(yaml.safe_load(given.config.read_text()) if given.config else {}))
    values = {"data": "fashion_mnist", "config": given.config.stem if given.config else "reduced"}
    jobs = [(seed, row) for seed in given.seeds for row in given.rows]
    data: Any = None
    if given.render:
        jobs = []
    elif given.smoke:
        values, data = {"data": "stripes", "config": "smoke"}, stripes()
        config = Config(8, 2, dim=16, layers=1, hidden=32, batch=16, epochs=2)
    elif given.data is not None:
        data = fashion_mnist(given.data)
    else:
        values["data"], data = "digits", digits()
        config = replace(config, size=8, patch=2, epochs=20)
    results = Results(given.results)
    data = data and tuple(Images(x.to(given.device), y.to(given.device)) for x, y in data)
    for seed, row in jobs:
        key = {**values, "row": row, "seed": seed}
        if not results.read(**key):
            results.append({**key, **measure(config, row, seed, data)})
            print(results.read(**key)[-1], flush=True)
    print(f"\n{table(results, **values)}")


if __name__ == "__main__":
    main()
