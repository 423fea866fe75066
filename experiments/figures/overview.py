"""The picture of the README: a learned spectrum, the mask it gives, attention without a matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.patches import Rectangle

from common.figures import BLUE, GREEN, GREY, ORANGE, clean, new_figure, save
from flt_mol import load_model

HEADS = (0, 1)


def draw_overview(path: Path) -> Path:
    """g(|ξ|) and the sampled ξ_t, f(r) and its estimate, and the products of linear attention."""
    figure = new_figure(12.0, 3.3)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.35])
    rpe = load_model("emt-small").encoder.rpe
    with torch.no_grad():
        _spectrum(left, rpe)
        _mask(middle, rpe)
    _products(right)
    return save(figure, path)


def _spectrum(axis: Any, rpe: Any) -> None:
    k = torch.linspace(0, 0.35, 141)
    frequencies, _ = rpe.frequencies(rpe.spectrum)
    spectrum = rpe.spectrum(torch.stack([k, 0 * k, 0 * k], -1))
    for head, colour in zip(HEADS, (BLUE, ORANGE), strict=True):
        axis.plot(k, spectrum[head], color=colour, label=f"g, head {head + 1}")
    lengths = frequencies.norm(dim=-1).flatten()
    axis.plot(lengths, 0 * lengths, "|", color=GREY, markersize=14, label="sampled ξ_t")
    axis.set(xlabel="|ξ| (cycles/Å)", ylabel="g (Å³)", xlim=(0, 0.35))
    axis.set_title("1. learn a spectrum g, sample frequencies", fontsize=10)
    axis.legend(frameon=False, fontsize=8)
    clean(axis)


def _mask(axis: Any, rpe: Any) -> None:
    r = torch.linspace(0, 10, 101)
    directions = torch.nn.functional.normalize(
        torch.randn(200, 3, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    points = r[:, None, None] * directions
    mask, sampled = rpe.mask(points[:, 0]), rpe.sampled_mask(points)
    for head, colour in zip(HEADS, (BLUE, ORANGE), strict=True):
        low, high = sampled[..., head].amin(1), sampled[..., head].amax(1)
        label = "Φ_i·Ψ_j, all directions"
        axis.fill_between(r, low, high, color=colour, alpha=0.18, linewidth=0, label=label)
        axis.plot(r, mask[:, head], color=colour, label=f"f, head {head + 1}")
    axis.set(xlabel="|r_i − r_j| (Å)", ylabel="mask (logits)", xlim=(0, 10))
    axis.set_title("2. its transform is the mask: f ≈ Φ_i·Ψ_j", fontsize=10)
    axis.legend(frameon=False, fontsize=8)
    clean(axis)


def _products(axis: Any) -> None:
    """softmax(q·k + f) v by an N × N matrix, and φ(q, Φ) (φ(k, Ψ)ᵀ v) without it."""
    axis.set(xlim=(0, 17.5), ylim=(0, 8.6), aspect="equal")
    axis.axis("off")
    axis.set_title("3. attend by sums over keys: no N × N matrix", fontsize=10)
    _box(axis, 0.2, 4.7, 3.6, 3.6, GREY, "softmax\n(q·k + f)")
    _box(axis, 4.2, 4.7, 1.1, 3.6, GREEN, "v")
    axis.text(5.9, 6.5, "N × N: time O(N²)", va="center", fontsize=9)
    _box(axis, 0.2, 0.2, 2.0, 3.6, BLUE, "φ(q, Φ)")
    axis.text(2.6, 2.0, "(", va="center", ha="center", fontsize=18)
    _box(axis, 3.0, 1.0, 3.6, 2.0, ORANGE, "φ(k, Ψ)ᵀ")
    _box(axis, 7.0, 0.2, 1.1, 3.6, GREEN, "v")
    axis.text(8.5, 2.0, ")", va="center", ha="center", fontsize=18)
    axis.text(9.1, 2.0, "=", va="center", fontsize=12)
    _box(axis, 10.2, 0.2, 2.0, 3.6, BLUE, "φ(q, Φ)")
    _box(axis, 12.6, 1.0, 1.1, 2.0, GREY, "Σ")
    axis.text(14.2, 2.0, "M × V:\ntime O(N)", va="center", fontsize=9)


def _box(
    axis: Any, x: float, y: float, width: float, height: float, colour: str, text: str
) -> None:
    axis.add_patch(Rectangle((x, y), width, height, facecolor=colour, alpha=0.25, edgecolor=colour))
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8)
