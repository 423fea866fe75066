"""Language models that differ in their attention alone: perplexity, time, parameters.

`run.py` trains what results.jsonl lacks and prints the table; `--text FILE` takes another text.
`--analyse` trains the first seed's FLT again, draws all its heads, and generates by steps.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.loop import seeded
from common.results import Results, markdown_table, mean_sd
from common.timing import flushed_denormals, threads
from language.analysis import attention_matrices, attention_shares, draw, generation
from language.model import ATTENTIONS, OURS, PAPER, LanguageModel, Size
from language.text import TOPICS, Corpus, batches, corpus, windows

HERE = Path(__file__).parent
PUBLISHED = {  # Choromanski, Li et al., AISTATS 2024, Table 1: perplexity on WikiText-103
    "Linear Transformer": 38.4, "RFA-Gaussian": 33.6, "RFA-arccos": 36.0,
    "RFA-Gaussian, gated": 31.3, "RFA-arccos, gated": 32.8, "Performer": 31.1, "cosFormer": 30.7,
    "Performer-sineSPE": 38.0, "Performer-convSPE": 37.8, "log-linear Performer": 30.6,
    "FLT (Gaussian mixture)": 30.3, "FLT (local)": 30.1,
}  # fmt: skip
SHARES = ("nearest", "farthest")  # tenth of the tokens in sight
BATCH, RATE = 4, 8e-3


def train(
    data: Corpus, size: Size, attention: Callable[[Size], nn.Module], seed: int, steps: int,
    rate: float,
) -> tuple[LanguageModel, float]:  # fmt: skip
    """AdamW, warm-up over a tenth of the steps, cosine decay; the model and seconds per step."""
    model = LanguageModel(size, attention).train()
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
    )
    seconds = []
    for tokens in batches(data.train, size.length, BATCH, steps, seed):
        start = time.process_time()
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seconds.append(time.process_time() - start)
    return model.eval(), median(seconds)


@torch.no_grad()
def perplexity(model: LanguageModel, data: Corpus) -> float:
    """The exponential of the mean loss per token, in windows that know nothing of each other."""
    total, count = 0.0, 0
    for tokens in windows(data.test, model.size.length).split(BATCH):
        loss = cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )
        total, count = total + loss.item(), count + tokens[:, 1:].numel()
    return math.exp(total / count)


def measure(data: Corpus, size: Size, name: str, seed: int, given: Any) -> dict[str, Any]:
    """Train and evaluate one model; its line of results."""
    with seeded(seed):
        model, seconds = train(data, size, ATTENTIONS[name], seed, given.steps, given.rate)
    return {
        "text": data.name, "model": name, "seed": seed, "steps": given.steps, "rate": given.rate,
        "size": list(size), "perplexity": round(perplexity(model, data), 3),
        "ms_per_step": round(1e3 * seconds, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        **attention_shares(model, windows(data.test, size.length)[:8, :-1]),
    }  # fmt: skip


def table(results: Results, **chosen: Any) -> str:
    """One row for each model; ratios are over the same seeds, and so the same batches."""
    base = {r["seed"]: r["perplexity"] for r in results.latest(model="Performer", **chosen)}
    rows = []
    for name in ATTENTIONS:
        found = results.latest(model=name, **chosen)
        if found:
            ms = median(record["ms_per_step"] for record in found)
            rows.append([
                name, mean_sd((r["perplexity"] for r in found), 1), len(found),
                mean_sd((r["perplexity"] / base[r["seed"]] for r in found if r["seed"] in base), 2),
                f"{ms:.0f}", f"{found[0]['parameters']:,}",
                *(mean_sd((r[part] for r in found if part in r), 3) for part in SHARES),
                PUBLISHED.get(name, "–"),
            ])  # fmt: skip
    head = [
        "attention",
        "perplexity",
        "seeds",
        "/ Performer",
        "ms per step",
        "parameters",
        *SHARES,
        "paper",
    ]
    return markdown_table(head, rows)


def main() -> None:
    """Parse the command line, train what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", default=TOPICS, help="a file, stdlib_docstrings or pydoc_topics")
    parser.add_argument("--models", nargs="+", choices=list(ATTENTIONS), default=list(ATTENTIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--paper-size", action="store_true", help="6 layers, 512 tokens, width 512")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--render", action="store_true", help="only print the table")
    parser.add_argument("--analyse", action="store_true", help="where a trained FLT attends")
    parser.add_argument("--figure", type=Path, default=HERE / "attention.png")
    parser.add_argument("--smoke", action="store_true", help="all models, tiny, a few steps")
    given = parser.parse_args()
    size = PAPER if given.paper_size else Size()
    if given.smoke:
        size, given.seeds, given.steps = Size(1, 64, 32, 2, 64, 16, 4, 8, 300), [0], 3
    results, chosen = Results(given.results), {"steps": given.steps, "size": list(size)}
    data = None if given.render else corpus(given.text, size.vocabulary)
    if given.smoke and data:
        data = data._replace(test=data.test[:1000])
    with threads(1), flushed_denormals():
        for seed in given.seeds if data else ():
            for name in given.models:
                key = {"text": data.name, "model": name, "seed": seed, "rate": given.rate}
                if not results.read(**key, **chosen):
                    results.append(record := measure(data, size, name, seed, given))
                    print(f"{name}, seed {seed}: {record['perplexity']:.2f}", flush=True)
        if data and (given.analyse or given.smoke):
            seed = given.seeds[0]
            with seeded(seed):
                model, _ = train(data, size, ATTENTIONS[OURS], seed, given.steps, given.rate)
            tokens = windows(data.test, size.length)[:1, :-1]
            draw([layer[0] for layer in attention_matrices(model, tokens)], given.figure)
            print(generation(model, tokens, 32))
    text = data.name if data else Path(given.text).name
    print(f"\n{table(results, text=text, rate=given.rate, **chosen)}")


if __name__ == "__main__":
    main()
