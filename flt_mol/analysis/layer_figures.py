"""Pictures of layers: attention matrices in every mode, and what a spectral filter learns."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from flt_mol.analysis.drawing import BLUE, GREY, ORANGE, clean, new_figure, save
from flt_mol.analysis.fitting import fit
from flt_mol.analysis.mask_figures import neighbour_shells
from flt_mol.nn.attention import FLTAttention
from flt_mol.nn.frequencies import GaussianFrequencies
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectral_filter import SpectralFilter
from flt_mol.nn.spectrum import GaussianSpectrum

__all__ = ["draw_attention_matrices", "draw_spectral_filter"]


def draw_attention_matrices(path: str | Path, length: int = 64) -> Path:
    """One head over a sequence: exact and linear, bidirectional and causal."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, length, 32, generator=generator, dtype=torch.float32)
    columns = {
        "exact": ("exact", 64),
        "linear, M = 64": ("linear", 64),
        "linear, M = 1,024": ("linear", 1024),
        "linear, M = 16,384": ("linear", 16384),
    }
    figure = new_figure(2.5 * len(columns) + 0.9, 5.3)
    axes = figure.subplots(2, len(columns), sharex=True, sharey=True)
    for row, causal in enumerate((False, True)):
        for axis, (name, (mode, features)) in zip(axes[row], columns.items(), strict=True):
            matrix = _layer(mode, features, causal).matrices(x)[0][0].detach()
            image = axis.imshow(matrix.numpy(), cmap="viridis", vmin=0, vmax=0.25)
            if row == 0:
                axis.set_title(name, fontsize=10)
            else:
                axis.set_xlabel("key j")
    for axis, name in zip(axes[:, 0], ("bidirectional", "causal"), strict=True):
        axis.set_ylabel(f"{name}\nquery i")
    figure.colorbar(image, ax=axes, label="attention weight (0.25 and more: brightest)", shrink=0.8)
    return save(figure, path)


def _layer(mode: str, features: int, causal: bool) -> FLTAttention:
    """The same weights and waves whatever the mode; a mask of height 3 and width 3 tokens."""
    generator = torch.Generator().manual_seed(0)
    spectrum = GaussianSpectrum(1, 1, dim=1, sigma_min=3.0, sigma_max=3.0)
    with torch.no_grad():
        spectrum.amplitude.fill_(3.0)
    frequencies = GaussianFrequencies(64, dim=1, sigma=0.053, sampling="sobol", generator=generator)
    rpe = FourierRPE(spectrum, frequencies, split="balanced")
    layer = FLTAttention(
        32, 1, rpe=rpe, num_features=features, mode=mode, causal=causal, generator=generator
    )
    with torch.no_grad():
        layer.query.weight.mul_(0.5)
    return layer


def draw_spectral_filter(path: str | Path, steps: int = 1500) -> Path:
    """g(|k|) and f(r) of a spectral filter before and after a fit to shells of neighbours.

    The target is smoothed as far as the filter's k_max allows: what remains is left to local terms.
    """
    generator = torch.Generator().manual_seed(0)
    r = torch.linspace(0, 10, 201, dtype=torch.float32)
    points = torch.stack([r, 0 * r, 0 * r], -1)
    k = torch.linspace(0, 1.05, 211, dtype=torch.float32)
    target = neighbour_shells(r)
    figure = new_figure(9.0, 3.2)
    left, right = figure.subplots(1, 2)
    right.plot(r, target, color=ORANGE, linewidth=3, alpha=0.5, label="target")
    for k_max, colour in ((0.45, GREY), (0.9, BLUE)):
        layer = SpectralFilter(1, 1, k_max=k_max, num_basis=16, generator=generator)
        loss = partial(_distance, layer, points, target)
        fit([layer.amplitudes], loss, steps, 0.02)
        with torch.no_grad():
            g, f = layer.spectrum(k)[:, 0], layer.filter(points)[:, 0]
        left.plot(k, g, color=colour, label=f"k_max = {k_max:g} Å⁻¹")
        right.plot(r, f, color=colour, label=f"k_max = {k_max:g} Å⁻¹")
    left.set(xlabel="|k| (cycles/Å)", ylabel="g(|k|) (Å³)", title="spectrum, learned")
    right.set(xlabel="r (Å)", ylabel="f(r)", title="filter it stands for")
    for axis in (left, right):
        axis.legend(frameon=False, fontsize=8)
        clean(axis)
    return save(figure, path)


def _distance(layer: SpectralFilter, points: Tensor, target: Tensor) -> Tensor:
    return (layer.filter(points)[:, 0] - target).square().mean()
