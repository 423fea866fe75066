"""How far linear attention is from the softmax with the same mask, for random queries and keys.

Error is ‖out − out*‖/‖out*‖ over the rows of a system, with out* the exact attention of the same
queries, keys and sampled waves, so that what is seen is the feature map's error alone. Two simpler
answers are yardsticks: exact attention without the mask, and the plain average of the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flt_mol.analysis.fitting import fit
from flt_mol.analysis.tables import markdown_table
from flt_mol.functional.fourier import fourier_basis, position_features
from flt_mol.functional.groups import mean_per_system, spread
from flt_mol.nn.attend import Projected, Rule, attend
from flt_mol.nn.feature_map import FEATURE_MAPS, FeatureMap

__all__ = ["Conditions", "Problem", "errors", "fidelity_rows", "fitted", "marked"]

# A slab's worth of atoms, Å; a mask of bond length to second neighbours.
BOX = (10.0, 10.0, 8.0)
SIGMA = 2.0
NO_MASK, AVERAGE = "exact, mask left out", "average of the values"


class Conditions(NamedTuple):
    """What fidelity depends on beside the feature map.

    Attributes:
        head_dim: D.
        scale: standard deviation of the entries of q and k. Logits q·k/√D have scale².
        magnitude: f(0); the mask is the sum of R waves of equal weight f(0)/R, the estimate of
            f(0) exp(−‖x‖²/2σ²) with σ = 2 Å.
        num_frequencies: R.
        atoms: rows of a system, at random places in a box of 10 × 10 × 8 Å.
        num_heads: H, independent repetitions.
        split: of the mask between Φ and Ψ.
    """

    head_dim: int = 16
    scale: float = 1.0
    magnitude: float = 1.0
    num_frequencies: int = 16
    atoms: int = 80
    num_heads: int = 8
    split: str = "one_sided"


class Problem:
    """Random attention problems with one set of frequencies.

    Args:
        conditions: what they have in common.
        seed: of the frequencies and of all problems that follow.
    """

    def __init__(self, conditions: Conditions, seed: int = 0) -> None:
        self.conditions = conditions
        self.generator = torch.Generator().manual_seed(seed)
        self.frequencies = self._normal(conditions.num_frequencies, 3) / (2 * math.pi * SIGMA)

    def draw(self, systems: int = 1) -> Projected:
        """Queries, keys, values and positions of some systems, all new."""
        c = self.conditions
        rows = systems * c.atoms
        shape = (rows, c.num_heads, c.head_dim)
        query, key, value = c.scale * self._normal(*shape), c.scale * self._normal(*shape), None
        value = self._normal(*shape)
        box = torch.tensor(BOX, dtype=torch.float32)
        uniform = torch.rand(rows, 3, generator=self.generator, dtype=torch.float32)
        ratio = torch.full((c.num_heads, c.num_frequencies), c.magnitude, dtype=torch.float32)
        basis = fourier_basis((uniform - 0.5) * box, self.frequencies)
        at = position_features(basis, ratio, c.split)
        ptr = torch.arange(systems + 1) * c.atoms
        return Projected(query, key, value, ptr, None, at, at)

    def feature_map(self, name: str, **settings: object) -> FeatureMap:
        """A map of `nn.FEATURE_MAPS` for these problems, drawn from their generator."""
        c = self.conditions
        if name != "elu":
            settings["generator"] = self.generator
        kind = FEATURE_MAPS[name]
        return kind(c.num_heads, c.head_dim, 2 * c.num_frequencies, **settings)  # type: ignore[arg-type]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float32)


def errors(out: Tensor, exact: Tensor) -> Tensor:
    """‖out − out*‖/‖out*‖ of each head: (N, H, V) → (H,)."""
    return ((out - exact).square().sum((0, 2)) / exact.square().sum((0, 2))).sqrt()


def linear_errors(feature_map: FeatureMap, rows: Projected) -> Tensor:
    """The error of linear attention with this map, (H,)."""
    return errors(_attend(feature_map, "linear", rows), exact_output(feature_map, rows))


def fitted(
    feature_map: FeatureMap, problem: Problem, steps: int = 500, systems: int = 1
) -> FeatureMap:
    """Fit the parameters of a map to exact attention, on new random problems in every step.

    What is lowered is the sum over heads of the squared errors of outputs, relative to the exact.

    Args:
        feature_map: with parameters, such as "softplus"; changed in place and returned.
        problem: where its training problems come from.
        steps: how many updates.
        systems: systems in each of them.
    """

    def loss() -> Tensor:
        return linear_errors(feature_map, problem.draw(systems)).square().sum()

    fit(feature_map.parameters(), loss, steps, 0.1)
    return feature_map


def yardsticks(rows: Projected) -> dict[str, Tensor]:
    """The errors (H,) of exact attention without the mask, and of the average of all values."""
    exact = exact_output(None, rows)
    bare = exact_output(None, rows._replace(query_at=None, key_at=None))
    average = spread(mean_per_system(rows.value, rows.ptr), rows.ptr, len(rows.value))
    return {NO_MASK: errors(bare, exact), AVERAGE: errors(average, exact)}


def exact_output(feature_map: FeatureMap | None, rows: Projected) -> Tensor:
    """Softmax attention with the mask that the position features stand for."""
    return _attend(feature_map, "exact", rows)


def _attend(feature_map: FeatureMap | None, mode: str, rows: Projected) -> Tensor:
    rule = Rule(feature_map, mode, False, 0)  # type: ignore[arg-type]
    return attend(rule, rows)


class Candidate(NamedTuple):
    """A feature map to be measured.

    Attributes:
        label: what the table calls it.
        name: in `nn.FEATURE_MAPS`.
        num_features: M, or None where the map has no choice.
        orthogonal: whether directions are, or None.
        split: of the mask; None for that of the conditions.
        fit: whether its parameters are fitted.
    """

    label: str
    name: str
    num_features: int | None
    orthogonal: bool | None = None
    split: str | None = None
    fit: bool = False

    @property
    def settings(self) -> dict[str, object]:
        """Keyword arguments of the map."""
        given = {"num_features": self.num_features, "orthogonal": self.orthogonal}
        return {name: value for name, value in given.items() if value is not None}


def candidates(features: Sequence[int] = (16, 64, 256), most: int = 1024) -> list[Candidate]:
    """Every feature map at every M of `features`, and the softmax ones at `most` besides."""
    chosen = [Candidate("softmax, iid", "softmax", m, False) for m in (*features, most)]
    chosen += [Candidate("softmax, orthogonal", "softmax", m, True) for m in (*features, most)]
    chosen += [
        Candidate(f"softmax, orthogonal, {split} split", "softmax", m, True, split)
        for split in ("balanced",)
        for m in features
    ]
    chosen += [Candidate("hyperbolic", "hyperbolic", m, True) for m in (*features, most)]
    chosen += [Candidate("relu", "relu", m, True) for m in features]
    chosen += [Candidate("elu", "elu", None)]
    chosen += [Candidate("softplus, fitted", "softplus", m, fit=True) for m in features]
    return chosen


def fidelity_rows(
    conditions: Iterable[Conditions],
    maps: Sequence[Candidate],
    draws: int = 4,
    steps: int = 500,
) -> dict[str, list[float]]:
    """Median errors by row label, one for each of `conditions`: the yardsticks first.

    Args:
        conditions: the columns.
        maps: the rows.
        draws: sets of frequencies, each with H systems' worth of heads; maps that are fitted take
            the first only.
        steps: of a fit.
    """
    table: dict[str, list[float]] = {}
    for condition in conditions:
        samples: dict[str, list[Tensor]] = {}
        for seed in range(draws):
            for label, error in _one_draw(condition, maps, seed, steps).items():
                samples.setdefault(label, []).append(error)
        for label, parts in samples.items():
            table.setdefault(label, []).append(torch.cat(parts).median().item())
    return table


def _one_draw(
    condition: Conditions, maps: Sequence[Candidate], seed: int, steps: int
) -> dict[str, Tensor]:
    with torch.no_grad():
        found = yardsticks(Problem(condition, seed).draw())
    for candidate in maps:
        if candidate.fit and seed:
            continue
        split = candidate.split or condition.split
        problem = Problem(condition._replace(split=split), seed)
        rows = problem.draw()
        feature_map = problem.feature_map(candidate.name, **candidate.settings)
        if candidate.fit:
            fitted(feature_map, problem, steps)
        width = feature_map.num_features
        with torch.no_grad():
            found[f"{candidate.label}, M = {width}"] = linear_errors(feature_map, rows)
    return found


def marked(table: dict[str, list[float]]) -> dict[str, list[str]]:
    """Errors as text; † where leaving out the mask would be nearer, ‡ where the average would.

    Example:
        >>> marked({NO_MASK: [0.3, 0.3], AVERAGE: [0.9, 0.9], "a map": [0.5, 1.2]})["a map"]
        ['0.50 †', '1.20 ‡']
    """
    shown = {}
    for label, values in table.items():
        cells = []
        for value, bare, average in zip(values, table[NO_MASK], table[AVERAGE], strict=True):
            mark = " ‡" if value > average else " †" if value > bare else ""
            cells.append(f"{value:.2f}{'' if label in (NO_MASK, AVERAGE) else mark}")
        shown[label] = cells
    return shown


def fidelity_markdown(table: dict[str, list[float]], conditions: Sequence[Conditions]) -> str:
    """The table as Markdown, a column for each of `conditions`."""
    head = ["feature map", *(f"s = {c.scale:g}, f(0) = {c.magnitude:g}" for c in conditions)]
    return markdown_table(head, ([label, *cells] for label, cells in marked(table).items()))
