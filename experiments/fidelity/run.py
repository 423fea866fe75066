"""How far linear attention is from exact attention with the same mask, and sampled masks from f.

Two tables. `features`: error ‖out − out*‖/‖out*‖ of linear attention against exact softmax with
the same queries, keys and sampled frequencies, so that only the feature map's error is seen; two
yardsticks are exact attention without the mask and the plain average of the values. `masks`: the
largest error of a sampled mask N̂ against f(x) = exp(−‖x‖²/2σ²), and what rotations change.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.figures import fit
from common.results import markdown_table
from common.timing import threads
from flt_mol.nn import (
    ComponentFrequencies,
    FLTAttention,
    FourierRPE,
    Frequencies,
    GaussianFrequencies,
    GaussianSpectrum,
    LatticeFrequencies,
    LebedevFrequencies,
)

BOX, ATOMS, HEADS, SIGMA = (10.0, 10.0, 8.0), 80, 8, 2.0  # Å; one slab's worth of atoms; σ of f, Å
NO_MASK, AVERAGE = "exact, without the mask", "average of the values"


class Conditions(NamedTuple):
    """Head dimension D, standard deviation of entries of q and k, height f(0), frequencies R."""

    head_dim: int = 16
    scale: float = 1.0
    magnitude: float = 1.0
    num_frequencies: int = 16


class Problem:
    """Random attention problems with one set of frequencies, through `FLTAttention` itself.

    Its projections are identities, so that rows of x are the queries, keys and values.
    """

    def __init__(self, conditions: Conditions, seed: int) -> None:
        self.conditions, self.seed = conditions, seed
        self.generator = torch.Generator().manual_seed(seed)
        c = conditions
        spectrum = GaussianSpectrum(HEADS, 1, sigma_min=SIGMA, sigma_max=SIGMA)
        with torch.no_grad():
            spectrum.amplitude.fill_(c.magnitude)
        frequencies = GaussianFrequencies(
            c.num_frequencies, sigma=1 / (2 * math.pi * SIGMA), generator=self.generator
        )
        self.rpe = FourierRPE(spectrum, frequencies)
        self.rows = self.draw()

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values (N, H·D) and positions (N, 3) of one system."""
        c = self.conditions
        query, key, value = torch.randn(3, ATOMS, HEADS * c.head_dim, generator=self.generator)
        box = torch.tensor(BOX)
        positions = (torch.rand(ATOMS, 3, generator=self.generator) - 0.5) * box
        return c.scale * query, c.scale * key, value, positions

    def layer(self, mode: str, rpe: bool = True, **settings: Any) -> FLTAttention:
        """An attention layer with identity projections."""
        width = HEADS * self.conditions.head_dim
        layer = FLTAttention(
            width, HEADS, rpe=self.rpe if rpe else None, mode=mode,
            generator=torch.Generator().manual_seed(self.seed), **settings,
        )  # fmt: skip
        with torch.no_grad():
            for part in (layer.query, layer.key, layer.value, layer.out):
                part.weight.copy_(torch.eye(width))
                if part.bias is not None:
                    part.bias.zero_()
        return layer.eval()

    def attended(self, layer: FLTAttention, rows: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        """(N, H, D) of one system."""
        query, key, value, positions = rows
        given = (
            {} if layer.rpe is None else {"positions": positions, "context_positions": positions}
        )
        ptr = torch.tensor([0, ATOMS])
        out = layer(query, context=key, context_values=value, ptr=ptr, context_ptr=ptr, **given)
        return out.view(ATOMS, HEADS, -1)


def errors(out: Tensor, exact: Tensor) -> Tensor:
    """‖out − out*‖/‖out*‖ of each head: (N, H, V) → (H,)."""
    return ((out - exact).square().sum((0, 2)) / exact.square().sum((0, 2))).sqrt()


def candidates(
    features: Sequence[int], most: int = 1024
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Label, settings of the layer, and whether its map is fitted to exact attention."""
    for m in (*features, most):
        for label, orthogonal in (("softmax, iid", False), ("softmax, orthogonal", True)):
            yield (
                f"{label}, M = {m}",
                {"feature_map": "softmax", "num_features": m, "orthogonal": orthogonal},
                False,
            )
        yield f"hyperbolic, M = {m}", {"feature_map": "hyperbolic", "num_features": m}, False
    for m in features:
        yield f"relu, M = {m}", {"feature_map": "relu", "num_features": m}, False
    yield "elu", {"feature_map": "elu", "num_features": None}, False
    for name in ("learned_relu", "softplus"):
        for m in features:
            yield f"{name}, fitted, M = {m}", {"feature_map": name, "num_features": m}, True


def feature_errors(
    conditions: Conditions, features: Sequence[int], draws: int, steps: int
) -> dict[str, float]:
    """Median error over heads and draws, by row label; fitted maps take the first draw only."""
    found: dict[str, list[Tensor]] = {}
    for seed in range(draws):
        problem = Problem(conditions, seed)
        rows = problem.rows
        with torch.no_grad():
            exact = problem.attended(problem.layer("exact"), rows)
            bare = problem.attended(problem.layer("exact", rpe=False), rows)
        found.setdefault(NO_MASK, []).append(errors(bare, exact))
        mean = rows[2].view(ATOMS, HEADS, -1).mean(0, keepdim=True).expand_as(exact)
        found.setdefault(AVERAGE, []).append(errors(mean, exact))
        for label, settings, fitted in candidates(features):
            if fitted and seed:
                continue
            layer = problem.layer("linear", **settings)
            if fitted:
                _fit(problem, layer, steps)
            with torch.no_grad():
                found.setdefault(label, []).append(errors(problem.attended(layer, rows), exact))
    return {label: torch.cat(parts).median().item() for label, parts in found.items()}


def _fit(problem: Problem, layer: FLTAttention, steps: int) -> None:
    """Fit a feature map to exact attention on a new random problem in every step."""
    reference = problem.layer("exact")

    def loss() -> Tensor:
        rows = problem.draw()
        with torch.no_grad():
            exact = problem.attended(reference, rows)
        return errors(problem.attended(layer, rows), exact).square().sum()

    fit(layer.feature_map.parameters(), loss, steps, 0.1)


def features_table(given: argparse.Namespace) -> str:
    """† where exact attention without the mask is nearer, ‡ where the average of the values is."""
    conditions = [Conditions(given.head_dim, s, m) for s in given.scales for m in given.magnitudes]
    columns = [feature_errors(c, given.features, given.draws, given.steps) for c in conditions]
    rows = []
    for label in columns[0]:
        marks = [
            ""
            if label == AVERAGE
            else " ‡"
            if c[label] > c[AVERAGE]
            else " †"
            if c[label] > c[NO_MASK]
            else ""
            for c in columns
        ]
        cells = [f"{c[label]:.2f}{mark}" for c, mark in zip(columns, marks, strict=True)]
        rows.append([label, *cells])
    head = [f"s = {c.scale:g}, f(0) = {c.magnitude:g}" for c in conditions]
    return markdown_table([f"feature map, D = {given.head_dim}", *head], rows)


def mask_error(
    sets: Sequence[Frequencies], sigma: float, radius: float, heads: int = 1
) -> tuple[float, float]:
    """Largest |N̂ − f| up to `radius` and widest range of N̂ over directions; medians over draws."""
    spectrum = GaussianSpectrum(heads, num_terms=1, sigma_min=sigma, sigma_max=sigma)
    generator = torch.Generator().manual_seed(0)
    u = torch.nn.functional.normalize(torch.randn(256, 3, generator=generator), dim=-1)
    error, turned = [], []
    with torch.no_grad():
        spectrum.amplitude.fill_(1.0)
        for frequencies in sets:
            rpe = FourierRPE(spectrum, frequencies)
            points = torch.linspace(0.0, radius, 49)[:, None, None] * u
            sampled = rpe.sampled_mask(points)
            error.append((sampled - rpe.mask(points)).abs().amax((0, 1)))
            turned.append((sampled.amax(1) - sampled.amin(1)).amax(0))
    return torch.cat(error).median().item(), torch.cat(turned).median().item()


def random_sets(
    sigma: float, counts: Iterable[int], draws: int
) -> Iterator[tuple[str, int, list[Frequencies], int]]:
    """Kind, R, sets, and heads of every random kind; of component-matched ones a set per head."""
    matched = 1 / (2 * math.pi * sigma)
    kinds: dict[str, dict[str, Any]] = {
        "Gaussian, σ per frequency, 0.04–0.16 Å⁻¹": {},
        "Gaussian, matched": {"sigma": matched},
        "Gaussian, matched, orthogonal": {"sigma": matched, "sampling": "orthogonal"},
        "Gaussian, matched, Sobol": {"sigma": matched, "sampling": "sobol"},
    }
    for count in counts:
        for kind, settings in kinds.items():
            seeds = (torch.Generator().manual_seed(seed) for seed in range(draws))
            yield (
                kind,
                count,
                [GaussianFrequencies(count, generator=g, **settings) for g in seeds],
                1,
            )
        for sampling in ("normal", "sobol"):
            seed = torch.Generator().manual_seed(0)
            one = ComponentFrequencies(count, draws, 1, sampling=sampling, generator=seed)
            yield f"component-matched, {sampling}", count, [one], draws


def masks_table(given: argparse.Namespace) -> str:
    """Two tables for each σ: random sets by R, deterministic ones by their settings."""
    parts = []
    for sigma in given.sigma:
        cells: dict[str, list[str]] = {}
        for kind, _, sets, heads in random_sets(sigma, given.counts, given.draws):
            error, turned = mask_error(sets, sigma, given.radius, heads)
            cells.setdefault(kind, []).append(f"{error:.2f}, {turned:.2f}")
        head = [f"σ = {sigma:g} Å: error, rotation", *(f"R = {count:,}" for count in given.counts)]
        parts.append(markdown_table(head, ([kind, *row] for kind, row in cells.items())))
        rows = []
        for cutoff, margin in ((2.5, 0.5), (3.0, 1.0), (4.2, 4.0)):
            for kind, family in (("lattice", LatticeFrequencies), ("shells", LebedevFrequencies)):
                one = family(given.radius, sigma, cutoff=cutoff, margin=margin)
                error, turned = mask_error([one], sigma, given.radius)
                rows.append(
                    [
                        f"{kind}, cutoff {cutoff:g}, margin {margin:g}",
                        one.num_frequencies,
                        f"{error:.1e}",
                        f"{turned:.1e}",
                    ]
                )
        parts.append(markdown_table(["deterministic", "R", "error", "rotation"], rows))
    return "\n\n".join(parts)


def main() -> None:
    """Print one of the two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("table", choices=["features", "masks"])
    add("--head-dim", type=int, default=16, help="D")
    add("--features", type=int, nargs="+", default=[16, 64, 256], help="M")
    add("--scales", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0])
    add("--magnitudes", type=float, nargs="+", default=[1.0, 3.0, 5.0])
    add("--draws", type=int, help="default: 4 of features, 8 of masks")
    add("--steps", type=int, default=500, help="of fits")
    add("--sigma", type=float, nargs="+", default=[2.0, 4.0], help="Å, of the mask")
    add("--counts", type=int, nargs="+", default=[16, 64, 256, 1024], help="R")
    add("--radius", type=float, default=18.0, help="Å")
    given = parser.parse_args()
    given.draws = given.draws or (4 if given.table == "features" else 8)
    with threads(1):
        print((features_table if given.table == "features" else masks_table)(given))


if __name__ == "__main__":
    main()
