"""Time to read a batch: pickled and compact records, with and without neighbour pairs.

What they are compared with is what a user writes who has nothing but PyG: `pickle.loads` of each
record and `torch_geometric.data.Batch.from_data_list` of the batch. All read the same systems in
the same order, from files that lie in the operating system's cache.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flt_mol.analysis.timing import Ratio, Timings, interleaved
from flt_mol.data import open_dataset
from flt_mol.data.lmdb.file import Environment

__all__ = ["PLAIN", "LoadingCost", "loading_cost"]

PLAIN = "pickle.loads + PyG collate"
_GRAPH = ("edge_index", "cell_offsets")


class LoadingCost(NamedTuple):
    """What reading costs.

    Attributes:
        timings: CPU seconds of all batches, by way of reading.
        systems: that each of them read.
    """

    timings: Timings
    systems: int

    def per_second(self, name: str) -> float:
        """Systems per CPU second."""
        return self.systems / self.timings.median(name)

    def speedup(self, name: str, over: str = PLAIN) -> Ratio:
        """How many times as many systems per second as another way reads."""
        return self.timings.ratio(over, name)


def loading_cost(
    distributed: str | Path,
    compact: str | Path,
    *,
    batch_size: int = 32,
    batches: int = 20,
    cutoff: float = 6.0,
    rounds: int = 9,
    seed: int = 0,
) -> LoadingCost:
    """Read the same random batches in all ways, taking turns, on one thread.

    Args:
        distributed: an LMDB file of pickled PyG 1.x records, as OC20 distributes them.
        compact: the same records as `flt-mol data convert` writes them, in the same order.
        batch_size: systems per batch, drawn with replacement.
        batches: that one round reads.
        cutoff: Å, of the neighbour pairs.
        rounds: repetitions.
        seed: of the draw.

    Raises:
        ImportError: torch_geometric is not installed.
    """
    pickled, packed = open_dataset(distributed), open_dataset(compact)
    rng = np.random.default_rng(seed)
    draws = [rng.integers(len(pickled), size=batch_size).tolist() for _ in range(batches)]
    plain = _Plain(Path(distributed))
    ways: dict[str, Callable[[Sequence[int]], Any]] = {
        PLAIN: plain.batch,
        "the same, graph dropped before collating": plain.batch_without_graph,
        "flt_mol, distributed LMDB": pickled.batch,
        "flt_mol, compact": packed.batch,
        f"flt_mol, distributed LMDB, pairs in {cutoff:g} Å": lambda draw: pickled.batch(
            draw
        ).with_pairs(cutoff),
        f"flt_mol, compact, pairs in {cutoff:g} Å": lambda draw: packed.batch(draw).with_pairs(
            cutoff
        ),
    }
    functions = {name: _reading(way, draws) for name, way in ways.items()}
    return LoadingCost(interleaved(functions, rounds), batches * batch_size)


def _reading(way: Callable[[Sequence[int]], Any], draws: Sequence[list[int]]) -> Callable[[], None]:
    def run() -> None:
        for draw in draws:
            way(draw)

    return run


class _Plain:
    """Reads records as they are pickled, by PyG, which runs whatever a pickle asks for."""

    def __init__(self, path: Path) -> None:
        from torch_geometric.data import Batch, Data

        self.environment = Environment.of(path.resolve())
        self.from_dict, self.collate = Data.from_dict, Batch.from_data_list

    def batch(self, draw: Sequence[int], left_out: Sequence[str] = ()) -> Any:
        """The systems with those keys; PyG 2 cannot use a 1.x object, but its dictionary."""
        parts = []
        for key in draw:
            record = pickle.loads(self.environment.get(str(key).encode()) or b"")
            fields = {k: v for k, v in record.__dict__.items() if v is not None}
            parts.append(self.from_dict({k: v for k, v in fields.items() if k not in left_out}))
        return self.collate(parts)

    def batch_without_graph(self, draw: Sequence[int]) -> Any:
        """The same without the stored graph, of which 97 % of a record consist."""
        return self.batch(draw, _GRAPH)
