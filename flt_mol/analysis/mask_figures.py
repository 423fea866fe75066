"""Pictures of masks: what spectra can learn, what training made of them, and local ones in 2D."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from flt_mol.analysis.drawing import BLUE, GREY, ORANGE, clean, new_figure, save
from flt_mol.analysis.fitting import fit
from flt_mol.nn.frequencies import GaussianFrequencies
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectrum import (
    BoxSpectrum,
    BSplineSpectrum,
    GaussianMixtureSpectrum,
    GaussianSpectrum,
    MaternSpectrum,
    ShellSpectrum,
    Spectrum,
    TentSpectrum,
)

__all__ = ["draw_learned_masks", "draw_local_masks", "draw_spectra", "fit_mask", "neighbour_shells"]


def neighbour_shells(distances: Tensor) -> Tensor:
    """A mask that marks first and second neighbours of copper and avoids what is closer: (…) → (…).

    Made up: Gaussians of 0.35 Å around 2.56 and 3.61 Å, and a wide negative one around 0.
    """
    near = (-(((distances - 2.56) / 0.35) ** 2) / 2).exp()
    second = (-(((distances - 3.61) / 0.35) ** 2) / 2).exp()
    return near + 0.6 * second - 0.5 * (-((distances / 1.2) ** 2) / 2).exp()


def fit_mask(spectrum: Spectrum, distances: Tensor, target: Tensor, steps: int = 2000) -> float:
    """Fit f(r) of one head to a target by Adam; the root mean square error at the end.

    Args:
        spectrum: of one head, over any ℓ; changed in place.
        distances: r (K,), Å, along the first axis.
        target: f(r) (K,).
        steps: how many updates.
    """
    points = torch.zeros(len(distances), spectrum.dim, dtype=distances.dtype)
    points[:, 0] = distances

    def loss() -> Tensor:
        return (spectrum.mask(points)[:, 0] - target).square().mean()

    fit(spectrum.parameters(), loss, steps, 0.03)
    with torch.no_grad():
        return loss().sqrt().item()


def _families() -> dict[str, Spectrum]:
    """One head of eight terms each, from the same seed."""

    def seed() -> torch.Generator:
        return torch.Generator().manual_seed(3)

    return {
        "Gaussians around 0": GaussianSpectrum(1, 8, generator=seed()),
        "Matérn, ν = 5/2": MaternSpectrum(1, 8, nu=2.5, generator=seed()),
        "B-splines, k = 4": BSplineSpectrum(1, 8, radius_min=1.5, generator=seed()),
        "Gaussian mixture": GaussianMixtureSpectrum(1, 8, generator=seed()),
        "shells, n = 0 … 7": ShellSpectrum(1, 8, sigma_min=1.0, sigma_max=1.0, generator=seed()),
    }


def draw_spectra(path: str | Path, steps: int = 2000) -> Path:
    """f(r) of several families before and after they are fitted to one target."""
    r = torch.linspace(0, 8, 161, dtype=torch.float32)
    target = neighbour_shells(r)
    families = _families()
    figure = new_figure(3.0 * len(families), 2.9)
    axes = figure.subplots(1, len(families), sharey=True)
    points = torch.stack([r, 0 * r, 0 * r], -1)
    for axis, (name, spectrum) in zip(axes, families.items(), strict=True):
        with torch.no_grad():
            before = spectrum.mask(points)[:, 0]
        error = fit_mask(spectrum, r, target, steps)
        with torch.no_grad():
            after = spectrum.mask(points)[:, 0]
        axis.plot(r, before, color=GREY, linestyle=":", label="at the start")
        axis.plot(r, target, color=ORANGE, linewidth=3, alpha=0.5, label="target")
        axis.plot(r, after, color=BLUE, label="fitted")
        axis.set_title(f"{name}\nerror {error:.3f}", fontsize=10)
        axis.set_xlabel("r (Å)")
        axis.set_ylim(-1.1, 1.5)
        clean(axis)
    axes[0].set_ylabel("f(r)")
    axes[0].legend(frameon=False, fontsize=8, loc="upper right")
    return save(figure, path)


def draw_learned_masks(rpe: FourierRPE, start: FourierRPE, path: str | Path) -> Path:
    """What training made of each head: f(r), and the range of N̂ over directions at each distance.

    Args:
        rpe: as trained.
        start: the same before training.
        path: where to write.
    """
    r = torch.linspace(0, 10, 101, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(200, rpe.dim, generator=generator, dtype=torch.float32)
    u = u / u.norm(dim=-1, keepdim=True)
    points = r[:, None, None] * u
    with torch.no_grad():
        before, after = start.mask(points[:, 0]), rpe.mask(points[:, 0])
        sampled = rpe.sampled_mask(points)
    figure = new_figure(3.0 * rpe.num_heads, 2.9)
    axes = figure.subplots(1, rpe.num_heads, sharey=True, squeeze=False)[0]
    for head, axis in enumerate(axes):
        low, high = sampled[..., head].amin(1), sampled[..., head].amax(1)
        axis.fill_between(
            r, low, high, color=BLUE, alpha=0.18, linewidth=0, label="N̂, all directions"
        )
        axis.plot(r, before[:, head], color=GREY, linestyle=":", label="f at the start")
        axis.plot(r, after[:, head], color=BLUE, label="f, trained")
        axis.plot(r, sampled[:, 0, head], color=ORANGE, linewidth=1, label="N̂, one direction")
        axis.set_title(f"head {head + 1}", fontsize=10)
        axis.set_xlabel("r (Å)")
        clean(axis)
    axes[0].set_ylabel("mask (logits)")
    axes[-1].legend(frameon=False, fontsize=8, loc="best")
    return save(figure, path)


def draw_local_masks(path: str | Path, num_frequencies: int = 256) -> Path:
    """Local masks over the plane, exact above, and below as random frequencies give them."""
    masks = {
        "box (k = 1)": BoxSpectrum(1, 1, 2, radius_max=4.0),
        "tent (k = 2)": TentSpectrum(1, 1, 2, radius_max=4.0),
        "B-spline, k = 3": BSplineSpectrum(1, 1, 2, order=3, radius_max=4.0),
        "B-spline, k = 6": BSplineSpectrum(1, 1, 2, order=6, radius_max=4.0),
    }
    coordinates = torch.linspace(-6, 6, 97, dtype=torch.float32)
    points = torch.cartesian_prod(coordinates, coordinates)
    figure = new_figure(2.6 * len(masks) + 0.9, 5.4)
    axes = figure.subplots(2, len(masks), sharex=True, sharey=True)
    for column, (name, spectrum) in enumerate(masks.items()):
        generator = torch.Generator().manual_seed(0)
        frequencies = GaussianFrequencies(num_frequencies, dim=2, generator=generator)
        with torch.no_grad():
            spectrum.amplitude.fill_(1.0)
            spectrum.log_radius.fill_(math.log(4.0))
            rpe = FourierRPE(spectrum, frequencies)
            shown = rpe.mask(points), rpe.sampled_mask(points)
        for axis, values in zip(axes[:, column], shown, strict=True):
            image = axis.imshow(
                values.view(97, 97).T.numpy(),
                origin="lower",
                extent=(-6, 6, -6, 6),
                cmap="RdBu_r",
                vmin=-1.2,
                vmax=1.2,
            )
        axes[0, column].set_title(name, fontsize=10)
        axes[1, column].set(xlabel="x (Å)", xticks=[-4, 0, 4], yticks=[-4, 0, 4])
    axes[0, 0].set_ylabel("f, exact\ny (Å)")
    axes[1, 0].set_ylabel(f"N̂, R = {num_frequencies}\ny (Å)")
    figure.colorbar(image, ax=axes, label="mask", shrink=0.8)
    return save(figure, path)
