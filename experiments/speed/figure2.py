"""The paper's Figure 2: time and memory of a layer on a batch of 8 sequences, by their length.

FLT, Performer, log-linear Performer (own form) and exact attention with a bias written out. Each
point runs in a process of its own, whose peak resident memory beyond weights and inputs counts, and
is a line of results.jsonl; what is there already is not measured again. `--render` only prints the
table and draws figure2.png.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.figures import BLUE, GREEN, GREY, ORANGE, clean, new_figure, save
from common.results import Results, markdown_table
from common.timing import process_memory
from speed.layers import LAYERS, OURS, Size

FOLDER = Path(__file__).parent
SEQUENCES = 8
NAMES = {
    "FLT, Gaussian RPE": BLUE, OURS: GREEN, "log-linear Performer": ORANGE,
    "softmax, dense bias": GREY,
}  # fmt: skip
# Forward at all lengths; backward of the log-linear form takes 10 MB a token: at 512 only.
POINTS = [(n, False) for n in (512, 1024, 2048, 4096, 8192)] + [(512, True)]


def measure(name: str, tokens: int, training: bool, rounds: int) -> dict[str, Any]:
    """Seconds of each call but the first, if there are several; peak bytes of the first."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size, seconds = Size(tokens), []
    layer = LAYERS[name](size).train(training)
    x = torch.randn(SEQUENCES * tokens, size.embed_dim, requires_grad=training)
    positions = 15 * torch.rand(len(x), 3)
    before, peak = process_memory(), None
    for _ in range(rounds):
        start = time.process_time()
        with torch.set_grad_enabled(training):
            out = layer(x, positions)
            if training:
                torch.autograd.grad(out.sum(), [x, *layer.parameters()], allow_unused=True)
        seconds.append(time.process_time() - start)
        peak = peak or process_memory()
    held = None if before is None or peak is None else peak[1] - before[0]
    return {
        "bench": "figure2", "layer": name, "tokens": tokens, "training": training,
        "sequences": SEQUENCES, "seconds": seconds[1:] or seconds, "rss": held,
    }  # fmt: skip


def table(records: list[dict[str, Any]]) -> str:
    """Seconds and GB of each layer by length; a dash where it was not measured."""
    found = {(r["layer"], r["tokens"], r["training"]): r for r in records}
    rows = []
    for tokens, training in sorted({p[1:] for p in found}, key=lambda p: (p[1], p[0])):
        each = [found.get((name, tokens, training)) for name in NAMES]
        cells = ["–" if r is None else f"{median(r['seconds']):.3g}" for r in each]
        cells += ["–" if r is None or r["rss"] is None else f"{r['rss'] / 1e9:.2f}" for r in each]
        rows.append([f"{tokens:,}{', training' if training else ''}", *cells])
    head = [*(f"{name} (s)" for name in NAMES), *(f"{name} (GB)" for name in NAMES)]
    return markdown_table([f"{SEQUENCES} sequences of", *head], rows)


def draw(records: list[dict[str, Any]], path: Path) -> Path:
    """Seconds and GB of a forward pass against the length, both logarithmic."""
    figure = new_figure(8.4, 3.4)
    axes = figure.subplots(1, 2)
    for name, colour in NAMES.items():
        mine = [r for r in records if r["layer"] == name and not r["training"] and r["rss"]]
        mine.sort(key=lambda r: int(r["tokens"]))
        tokens = [r["tokens"] for r in mine]
        axes[0].plot(tokens, [median(r["seconds"]) for r in mine], ".-", color=colour, label=name)
        axes[1].plot(tokens, [r["rss"] / 1e9 for r in mine], ".-", color=colour)
    ticks = sorted({r["tokens"] for r in records})
    for axis, label in zip(axes, ("forward pass (s)", "peak memory (GB)"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        axis.set_xticks(ticks, [f"{n:,}" for n in ticks], minor=False)
        axis.minorticks_off()
        clean(axis)
    axes[0].legend(frameon=False, fontsize=8)
    return save(figure, path)


def main() -> None:
    """Measure what is missing, shortest first, print the table, draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--smoke", action="store_true", help="64 tokens only")
    add("--rounds", type=int, default=4, help="calls of a point; fewer from 2,048 tokens on")
    add("--results", type=Path, default=FOLDER / "results.jsonl")
    add("--figure", type=Path, default=FOLDER / "figure2.png")
    add("--render", action="store_true", help="only print and draw")
    given = parser.parse_args()
    results = Results(given.results)
    points = [(64, False), (64, True)] if given.smoke else POINTS
    for tokens, training in [] if given.render else points:
        rounds = 1 if training else max(1, given.rounds - tokens // 1024)
        for name in NAMES:
            point = {"layer": name, "tokens": tokens, "training": training}
            if results.read(bench="figure2", **point):
                continue
            # Forked, so that each process has imported what it needs; nothing has been computed.
            with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
                results.append(pool.submit(measure, name, tokens, training, rounds).result())
            print(f"{point}: done", flush=True)
    records = results.read(bench="figure2")
    print(f"\n{table(records)}\n{draw(records, given.figure)}")


if __name__ == "__main__":
    main()
