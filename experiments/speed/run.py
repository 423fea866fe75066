"""Time and memory: a layer over lengths, steps of whole models, one large system, modes, molecules.

Each point runs in a process of its own and is a line in results.jsonl; within a point, everything
that is compared takes turns. Packages that are not installed are skipped (pip install --no-deps
performer-pytorch==1.1.4 einops local-attention axial-positional-embedding hyper-connections
torch-einops-utils; pip install torch_geometric). `--render` only prints tables.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.results import Results, markdown_table
from common.rivals import SchNetPackaged
from common.timing import (
    Timings,
    flushed_denormals,
    interleaved,
    peak_memory,
    process_memory,
    threads,
)
from flt_mol.data import open_dataset
from flt_mol.models import EnergyConfig, EnergyModel, named_config
from flt_mol.nn import FLTAttention, FourierRPE, GaussianFrequencies, GaussianSpectrum
from flt_mol.structures import Structures
from speed.layers import LAYERS, OURS, Size, installed
from speed.systems import crystal, slabs

SLABS = Path(__file__).parents[2] / "datasets" / "emt_adsorption" / "train.lmdb"
MHA = "MultiheadAttention"
MOLECULES = [15, 16, 18, 15, 16, 19, 14, 17, 16, 17, 17, 17]
RATIOS = [
    ("FLT, Gaussian RPE", OURS), ("FLT, local RPE", OURS), (OURS, "performer-pytorch"),
    (OURS, "PyG PerformerAttention"), ("log-linear Performer", OURS), ("softmax, dense bias", OURS),
]  # fmt: skip


def _inference(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return torch.no_grad()(call)


def _training(call: Callable[[], Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    return lambda: torch.autograd.grad(call().sum(), inputs, allow_unused=True)


def _record(timings: Timings, runs: dict[str, Callable[[], object]]) -> dict[str, Any]:
    with threads(1):
        held = {name: peak_memory(run) for name, run in runs.items()}
    return {
        "seconds": {n: [float(f"{t:.4g}") for t in s] for n, s in timings.seconds.items()},
        "bytes": held,
    }


def lengths(tokens: int, training: bool, rounds: int) -> dict[str, Any]:
    """Seconds and bytes of every layer at one length."""
    size, runs = Size(tokens), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages
        for name in installed(list(LAYERS)):
            layer = LAYERS[name](size).eval()
            x = torch.randn(tokens, size.embed_dim, requires_grad=True)
            positions = 15 * torch.rand(tokens, 3)
            call = _bound(layer, x, positions)
            runs[name] = _training(call, [x, *layer.parameters()]) if training else _inference(call)
        return _record(interleaved(runs, rounds, at_least=0.05), runs)


def _bound(layer: nn.Module, *arguments: Tensor) -> Callable[[], Tensor]:
    return lambda: layer(*arguments)  # type: ignore[no-any-return]


def _our_config() -> EnergyConfig:
    return EnergyConfig.model_validate({
        "embed_dim": 256, "num_heads": 8, "num_layers": 6, "ffn_dim": 512, "rpe": None,
        "spectral": {"num_heads": 8}, "pairs": {"cutoff": 6.0, "density": False},
    })  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear attention + filters, width 256": lambda: EnergyModel(_our_config()),
    "flt-small": lambda: EnergyModel(named_config("flt-small")),
    "flt-base": lambda: EnergyModel(named_config("flt-base")),
    "SchNet (PyG), width 256": lambda: SchNetPackaged(256, 6.0, 6, 50),
}


def training_step(num_slabs: int, rounds: int) -> dict[str, Any]:
    """Seconds and bytes of forward and backward of whole models on slabs of 80 atoms."""
    batch, runs = slabs(num_slabs), {}
    for name, build in MODELS.items():
        model: Any = build().train()
        runs[name] = _step(model, batch.with_pairs(model.cutoff))
    with flushed_denormals():
        found = _record(interleaved(runs, rounds), runs)
    return {**found, "atoms": batch.num_atoms}


def _step(model: nn.Module, batch: Structures) -> Callable[[], object]:
    weights = [p for p in model.parameters() if p.requires_grad]

    def loss() -> Tensor:
        out = model(batch)
        total = out["energy"].sum()
        return total + out["displacement"].square().sum() if "displacement" in out else total  # type: ignore[no-any-return]

    return lambda: torch.autograd.grad(loss(), weights, allow_unused=True)


def one_system(atoms: int, rounds: int) -> dict[str, Any]:
    """Seconds and bytes of `flt-small`'s energy of one crystal, and seconds to search its pairs.

    Memory of the process is read before tensors are counted. Large crystals are measured once.
    """
    model = EnergyModel(named_config("flt-small")).eval()
    structures = crystal(atoms)
    start = time.process_time()
    structures = structures.with_pairs(float(model.cutoff or 0))
    searched = time.process_time() - start
    run = _inference(lambda: model(structures)["energy"].sum())
    if atoms >= 64_000:
        start = time.process_time()
        run()
        seconds = {"model": [time.process_time() - start]}
    else:
        seconds = interleaved({"model": run}, rounds).seconds
    memory = process_memory()
    return {
        "model": "flt-small", "atoms": structures.num_atoms, "pair_seconds": round(searched, 3),
        "seconds": seconds, "rss": None if memory is None else memory[1],
    }  # fmt: skip


def modes(tokens: int, head_dim: int, training: bool, rounds: int) -> dict[str, Any]:
    """Seconds of linear and exact attention on a batch of equal systems, 4,096 rows in all."""
    heads = 256 // head_dim
    rpe = FourierRPE(GaussianSpectrum(heads, num_terms=16), GaussianFrequencies(16))
    layer = FLTAttention(256, heads, num_features=64, rpe=rpe).eval()
    systems = max(1, 4096 // tokens)
    ptr = torch.arange(systems + 1) * tokens
    x = torch.randn(systems * tokens, 256, requires_grad=True)
    positions = 15 * torch.rand(len(x), 3)
    runs: dict[str, Callable[[], object]] = {}
    for mode in ("linear", "exact"):
        call = _in_mode(layer, mode, x, positions, ptr)
        runs[mode] = _training(call, [x, *layer.parameters()]) if training else _inference(call)
    return {"seconds": interleaved(runs, rounds).seconds}


def _in_mode(
    layer: FLTAttention, mode: str, x: Tensor, positions: Tensor, ptr: Tensor
) -> Callable[[], Tensor]:
    def call() -> Tensor:
        layer.mode = mode
        return layer(x, positions, ptr=ptr)  # type: ignore[no-any-return]

    return call


def compiled(model: str, rounds: int) -> dict[str, Any]:
    """Training steps of an epoch, compiled and, every few, eager; seconds to compile, and graphs.

    Batches of 48 slabs of `emt_adsorption` in random order, so of any size, dropout on.
    """
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    dataset = open_dataset(SLABS)
    order, size = torch.randperm(len(dataset)).tolist(), 48
    eager = MODELS[model]()
    fast = MODELS[model]()
    fast.compile(fullgraph=True, dynamic=True)
    seconds: dict[str, list[float]] = {"eager": [], "compiled": []}
    first = 0.0
    for number, start in enumerate(range(0, len(order), size)):
        batch = eager.prepare_batch(dataset.batch(order[start : start + size]))  # type: ignore[operator]
        both = {"compiled": fast, "eager": eager} if number % rounds == 0 else {"compiled": fast}
        for name, one in both.items():
            begin = time.process_time()
            _step(one, batch)()
            took = time.process_time() - begin
            if number:
                seconds[name].append(took)
            elif name == "compiled":
                first = took
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"first_step": first, "graphs": graphs, "seconds": seconds}


def molecules(systems: int, rounds: int) -> dict[str, Any]:
    """Seconds of a training step of attention alone, and of `flt-small` on one molecule of 17."""
    sizes = MOLECULES * (systems // 12) if systems > 1 else [2600]
    length, counts = max(sizes), torch.tensor(sizes)
    ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    x, positions = torch.randn(sum(sizes), 64), 10 * torch.rand(sum(sizes), 3)
    real = torch.arange(length) < counts[:, None]
    padded = torch.zeros(len(sizes), length, 64)
    padded[real] = x
    theirs = nn.MultiheadAttention(64, 4, batch_first=True)

    def multihead() -> Tensor:
        return theirs(padded, padded, padded, key_padding_mask=~real, need_weights=False)[0]  # type: ignore[no-any-return]

    runs: dict[str, Callable[[], object]] = {MHA: _training(multihead, [*theirs.parameters()])}
    for mode in ("exact", "linear"):
        for with_positions in (False, True):
            rpe, given = None, {"ptr": ptr}
            if with_positions:
                rpe = FourierRPE(GaussianSpectrum(4, num_terms=16), GaussianFrequencies(32))
                given["positions"] = positions
            layer = FLTAttention(64, 4, rpe=rpe, mode=mode)
            name = f"{mode}, positions" if with_positions else mode
            runs[name] = _training(partial(layer, x, **given), [*layer.parameters()])
    model = EnergyModel(named_config("flt-small")).eval()
    molecule = Structures.single([6] * 5 + [1] * 12, (6 * torch.rand(17, 3)).tolist())
    runs["one molecule"] = _inference(lambda: model(molecule)["energy"])
    return {"seconds": interleaved(runs, rounds, at_least=0.02).seconds}


def machine() -> str:
    """Processor and versions."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass
    return f"{name}, torch {torch.__version__}"


def _measured(bench: str, point: dict[str, Any], rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = BENCHES[bench][0](**point, rounds=rounds)
    return {"bench": bench, **point, **found, "machine": machine()}


def _lengths_table(records: list[dict[str, Any]]) -> str:
    parts = []
    for training in (False, True):
        for what in ("seconds", "bytes"):
            rows = []
            for r in sorted(
                (r for r in records if r["training"] == training), key=lambda r: r["tokens"]
            ):
                cells = [f"{r['tokens']:,}"]
                for name, over in RATIOS:
                    there = name in r[what] and over in r[what]
                    cells.append("–" if not there else f"{_over(r, what, name, over):.2f}")
                rows.append(cells)
            title = f"{'training' if training else 'forward'}, {what}: tokens"
            if rows:
                parts.append(markdown_table([title, *(f"{a} / {b}" for a, b in RATIOS)], rows))
    return "\n\n".join(parts)


def _over(record: dict[str, Any], what: str, name: str, over: str) -> float:
    if what == "bytes":
        return float(record["bytes"][name] / record["bytes"][over])
    return Timings(record["seconds"]).ratio(name, over)[0]


def _steps_table(records: list[dict[str, Any]]) -> str:
    last = records[-1]
    rows = []
    for name, seconds in last["seconds"].items():
        step = median(seconds)
        rows.append(
            [
                name,
                f"{step:.3g}",
                f"{last['atoms'] / step:,.0f}",
                f"{last['bytes'][name] / 1e6:,.0f}",
            ]
        )
    return markdown_table(["model", "s / step", "atoms/s", "peak MB"], rows)


def _system_table(records: list[dict[str, Any]]) -> str:
    records = sorted((r for r in records if "model" in r), key=lambda r: r["atoms"])
    rows = [
        [f"{r['atoms']:,}", f"{median(r['seconds']['model']):.3g}", f"{r['pair_seconds']:.2f}",
         "–" if r["rss"] is None else f"{r['rss'] / 1e9:.2f}"]
        for r in records
    ]  # fmt: skip
    text = markdown_table(["atoms", "forward (s)", "pairs (s)", "GB of the process"], rows)
    large = [(r["atoms"], median(r["seconds"]["model"])) for r in records if r["atoms"] >= 4000]
    if len(large) > 1:
        x, y = np.log(np.array(large, dtype=float)).T
        text += f"\n\nFrom 4,000 atoms on, time grows as N^{np.polyfit(x, y, 1)[0]:.2f}."
    return text


def _compiled_table(records: list[dict[str, Any]]) -> str:
    head = ["model", "compiled / eager", "eager (s)", "first step (s)", "graphs of an epoch"]
    rows = []
    for r in records:
        fast, plain = (median(r["seconds"][name]) for name in ("compiled", "eager"))
        rows.append([
            r["model"], f"{fast / plain:.2f}", f"{plain:.3f}", f"{r['first_step']:.0f}", r["graphs"]
        ])  # fmt: skip
    return markdown_table(head, rows)


def _modes_table(records: list[dict[str, Any]]) -> str:
    rows = [
        [f"{r['tokens']:,}", r["head_dim"], "training" if r["training"] else "forward",
         f"{Timings(r['seconds']).ratio('exact', 'linear')[0]:.2f}"]
        for r in records
    ]  # fmt: skip
    return markdown_table(["atoms of a system", "D", "", "exact / linear"], rows)


def _molecules_table(records: list[dict[str, Any]]) -> str:
    rows = []
    for r in records:
        timings = Timings(r["seconds"])
        ours = [name for name in r["seconds"] if name not in (MHA, "one molecule")]
        ratios = [f"{timings.ratio(name, MHA)[0]:.2f}" for name in ours]
        times = [f"{1e3 * timings.median(name):.2f}" for name in (MHA, "one molecule")]
        rows.append([f"{r['systems']} × {16 if r['systems'] > 1 else 2600}", *ratios, *times])
    title = ["systems × atoms, over MHA:", *ours, "MHA (ms)", "one molecule of 17, flt-small (ms)"]
    return markdown_table(title, rows)


_TOKENS = (512, 1024, 2048, 4096, 8192)
BENCHES: dict[
    str, tuple[Callable[..., dict[str, Any]], list[dict[str, Any]], Callable[..., str]]
] = {
    "lengths": (
        lengths,
        [{"tokens": n, "training": t} for n in _TOKENS for t in (False, True)],
        _lengths_table,
    ),
    "training_step": (training_step, [{"num_slabs": 32}], _steps_table),
    "one_system": (
        one_system,
        [{"atoms": n} for n in (4000, 16000, 64000, 250000, 1000000)],
        _system_table,
    ),
    "compiled": (
        compiled,
        [{"model": "flt-small"}, {"model": "linear attention + filters, width 256"}],
        _compiled_table,
    ),
    "modes": (
        modes,
        [
            {"tokens": n, "head_dim": d, "training": t}
            for d in (16, 64)
            for t in (False, True)
            for n in (64, 128, 256, 512)
        ],
        _modes_table,
    ),
    "molecules": (
        molecules,
        [{"systems": n} for n in (12, 156, 1)],
        _molecules_table,
    ),
}


def main() -> None:
    """Measure the points of a benchmark, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bench", choices=list(BENCHES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--at-most", type=int, help="largest number of tokens or atoms")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results.jsonl")
    parser.add_argument("--render", action="store_true", help="only print the tables")
    given = parser.parse_args()
    results, (_, points, table) = Results(given.results), BENCHES[given.bench]
    for point in [] if given.render else points:
        size = point.get("tokens", point.get("atoms", 0))
        if given.at_most is not None and size > given.at_most:
            continue
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as pool:
            results.append(pool.submit(_measured, given.bench, point, given.rounds).result())
        print(f"{given.bench}, {point}: done", flush=True)
    records = results.read(bench=given.bench)
    print(f"\n{table(records)}" if records else f"no results in {results.path}")


if __name__ == "__main__":
    main()
