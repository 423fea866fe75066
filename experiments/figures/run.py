"""Draw the figures of the documentation: spectra, masks, a run, its evaluation, a relaxation."""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import torch
from ase.build import add_adsorbate, fcc111
from ase.calculators.emt import EMT
from ase.visualize.plot import plot_atoms
from PIL import Image
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.figures import BLUE, GREY, ORANGE, clean, fit, new_figure, save
from figures.overview import draw_overview
from flt_mol import load_model
from flt_mol.cli import main as flt_mol
from flt_mol.data import from_ase, tag_slab
from flt_mol.models import EnergyModel
from flt_mol.nn import (
    BSplineSpectrum,
    FLTAttention,
    FourierRPE,
    GaussianFrequencies,
    GaussianMixtureSpectrum,
    GaussianSpectrum,
    MaternSpectrum,
    SpectralFilter,
    Spectrum,
)
from flt_mol.prediction.relaxation import relax_structures


def _seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def _along_x(r: Tensor) -> Tensor:
    return torch.stack([r, 0 * r, 0 * r], -1)


def neighbour_shells(r: Tensor) -> Tensor:
    """A mask that marks first and second neighbours of copper, and avoids what is closer."""
    near = (-(((r - 2.56) / 0.35) ** 2) / 2).exp()
    second = (-(((r - 3.61) / 0.35) ** 2) / 2).exp()
    return near + 0.6 * second - 0.5 * (-((r / 1.2) ** 2) / 2).exp()


def draw_spectra(path: Path, steps: int = 2000) -> Path:
    """f(r) of several families of spectra before and after they are fitted to one target."""
    families: dict[str, Spectrum] = {
        "Gaussians around 0": GaussianSpectrum(1, 8, generator=_seed(3)),
        "Matérn, ν = 5/2": MaternSpectrum(1, 8, nu=2.5, generator=_seed(3)),
        "B-splines, k = 4": BSplineSpectrum(1, 8, radius_min=1.5, generator=_seed(3)),
        "Gaussian mixture": GaussianMixtureSpectrum(1, 8, generator=_seed(3)),
    }
    r = torch.linspace(0, 8, 161)
    target, points = neighbour_shells(r), _along_x(r)
    figure = new_figure(3.0 * len(families), 2.9)
    axes = figure.subplots(1, len(families), sharey=True)
    for axis, (name, spectrum) in zip(axes, families.items(), strict=True):
        before = spectrum.mask(points)[:, 0].detach()
        loss = partial(_distance, spectrum.mask, points, target)
        fit(spectrum.parameters(), loss, steps, 0.03)
        after = spectrum.mask(points)[:, 0].detach()
        axis.plot(r, before, color=GREY, linestyle=":", label="initial")
        axis.plot(r, target, color=ORANGE, linewidth=3, alpha=0.5, label="target")
        axis.plot(r, after, color=BLUE, label="fitted")
        axis.set_title(f"{name}\nerror {(after - target).square().mean().sqrt():.3f}", fontsize=10)
        axis.set(xlabel="r (Å)", ylim=(-1.1, 1.5))
        clean(axis)
    axes[0].set_ylabel("f(r)")
    axes[0].legend(frameon=False, fontsize=8, loc="upper right")
    return save(figure, path)


def _distance(function: object, points: Tensor, target: Tensor) -> Tensor:
    return (function(points)[:, 0] - target).square().mean()  # type: ignore[operator,no-any-return]


def draw_learned_masks(path: Path) -> Path:
    """What training made of each head's mask: f(r), and the range of N̂ over directions."""
    model = load_model("emt-small")
    rpe, start = model.encoder.rpe, EnergyModel(model.config).encoder.rpe
    r = torch.linspace(0, 10, 101)
    u = torch.nn.functional.normalize(torch.randn(200, 3, generator=_seed(0)), dim=-1)
    points = r[:, None, None] * u
    with torch.no_grad():
        before, after = start.mask(points[:, 0]), rpe.mask(points[:, 0])
        sampled = rpe.sampled_mask(points)
    heads = after.shape[-1]
    figure = new_figure(3.0 * heads, 2.9)
    axes = figure.subplots(1, heads, sharey=True, squeeze=False)[0]
    for head, axis in enumerate(axes):
        low, high = sampled[..., head].amin(1), sampled[..., head].amax(1)
        axis.fill_between(
            r, low, high, color=BLUE, alpha=0.18, linewidth=0, label="N̂, all directions"
        )
        axis.plot(r, before[:, head], color=GREY, linestyle=":", label="f, initial")
        axis.plot(r, after[:, head], color=BLUE, label="f, trained")
        axis.plot(r, sampled[:, 0, head], color=ORANGE, linewidth=1, label="N̂, one direction")
        axis.set_title(f"head {head + 1}", fontsize=10)
        axis.set_xlabel("r (Å)")
        clean(axis)
    axes[0].set_ylabel("mask (logits)")
    axes[-1].legend(frameon=False, fontsize=8, loc="best")
    return save(figure, path)


def draw_local_masks(path: Path, num_frequencies: int = 256) -> Path:
    """Local masks over the plane: exact above, below as random frequencies give them."""
    masks: dict[str, Spectrum] = {
        "box (k = 1)": BSplineSpectrum(1, 1, 2, order=1, radius_max=4.0),
        "tent (k = 2)": BSplineSpectrum(1, 1, 2, order=2, radius_max=4.0),
        "B-spline, k = 3": BSplineSpectrum(1, 1, 2, order=3, radius_max=4.0),
        "B-spline, k = 6": BSplineSpectrum(1, 1, 2, order=6, radius_max=4.0),
    }
    coordinates = torch.linspace(-6, 6, 97)
    points = torch.cartesian_prod(coordinates, coordinates)
    figure = new_figure(2.6 * len(masks) + 0.9, 5.4)
    axes = figure.subplots(2, len(masks), sharex=True, sharey=True)
    for column, (name, spectrum) in enumerate(masks.items()):
        frequencies = GaussianFrequencies(num_frequencies, dim=2, generator=_seed(0))
        with torch.no_grad():
            spectrum.amplitude.fill_(1.0)
            spectrum.log_radius.fill_(math.log(4.0))
            rpe = FourierRPE(spectrum, frequencies)
            shown = rpe.mask(points), rpe.sampled_mask(points)
        for axis, values in zip(axes[:, column], shown, strict=True):
            image = axis.imshow(
                values.view(97, 97).T.numpy(), origin="lower", extent=(-6, 6, -6, 6),
                cmap="RdBu_r", vmin=-1.2, vmax=1.2,
            )  # fmt: skip
        axes[0, column].set_title(name, fontsize=10)
        axes[1, column].set(xlabel="x (Å)", xticks=[-4, 0, 4], yticks=[-4, 0, 4])
    axes[0, 0].set_ylabel("f, exact\ny (Å)")
    axes[1, 0].set_ylabel(f"N̂, R = {num_frequencies}\ny (Å)")
    figure.colorbar(image, ax=axes, label="mask", shrink=0.8)
    return save(figure, path)


def draw_attention_matrices(path: Path, length: int = 64) -> Path:
    """One head over a sequence: exact and linear, bidirectional and causal."""
    x = torch.randn(1, length, 32, generator=_seed(1))
    columns = [("exact", "exact", 64)]
    columns += [(f"linear, M = {m:,}", "linear", m) for m in (64, 1024, 16384)]
    figure = new_figure(2.5 * len(columns) + 0.9, 5.3)
    axes = figure.subplots(2, len(columns), sharex=True, sharey=True)
    for row, causal in enumerate((False, True)):
        for axis, (name, mode, features) in zip(axes[row], columns, strict=True):
            matrix = _layer(mode, features, causal).matrices(x)[0][0].detach()
            image = axis.imshow(matrix.numpy(), cmap="viridis", vmin=0, vmax=0.25)
            axis.set(**({"title": name} if row == 0 else {"xlabel": "key j"}))
    for axis, name in zip(axes[:, 0], ("bidirectional", "causal"), strict=True):
        axis.set_ylabel(f"{name}\nquery i")
    figure.colorbar(image, ax=axes, label="attention weight (clipped at 0.25)", shrink=0.8)
    return save(figure, path)


def _layer(mode: str, features: int, causal: bool) -> FLTAttention:
    """The same weights and frequencies in all modes; a mask of height 3 and width 3 tokens."""
    generator = _seed(0)
    spectrum = GaussianSpectrum(1, 1, dim=1, sigma_min=3.0, sigma_max=3.0)
    frequencies = GaussianFrequencies(64, dim=1, sigma=0.053, sampling="sobol", generator=generator)
    rpe = FourierRPE(spectrum, frequencies, split="balanced")
    layer = FLTAttention(
        32, 1, rpe=rpe, num_features=features, mode=mode, causal=causal, generator=generator
    )
    with torch.no_grad():
        spectrum.amplitude.fill_(3.0)
        layer.query.weight.mul_(0.5)
    return layer


def draw_spectral_filter(path: Path, steps: int = 1500) -> Path:
    """g(|k|) and f(r) of a spectral filter, fitted to shells of neighbours for two k_max."""
    generator = _seed(0)
    r, k = torch.linspace(0, 10, 201), torch.linspace(0, 1.05, 211)
    points, target = _along_x(r), neighbour_shells(r)
    figure = new_figure(9.0, 3.2)
    left, right = figure.subplots(1, 2)
    right.plot(r, target, color=ORANGE, linewidth=3, alpha=0.5, label="target")
    for k_max, colour in ((0.45, GREY), (0.9, BLUE)):
        layer = SpectralFilter(1, 1, k_max=k_max, num_basis=16, generator=generator)
        fit([layer.amplitudes], partial(_distance, layer.filter, points, target), steps, 0.02)
        label = f"k_max = {k_max:g} Å⁻¹"
        left.plot(k, layer.spectrum(k)[:, 0].detach(), color=colour, label=label)
        right.plot(r, layer.filter(points)[:, 0].detach(), color=colour, label=label)
    left.set(xlabel="|k| (cycles/Å)", ylabel="g(|k|) (Å³)", title="learned spectrum")
    right.set(xlabel="r (Å)", ylabel="f(r)", title="filter of this spectrum")
    for axis in (left, right):
        axis.legend(frameon=False, fontsize=8)
        clean(axis)
    return save(figure, path)


def _shrink(source: Path, path: Path) -> Path:
    """A PNG of few colours."""
    Image.open(source).convert("RGB").quantize(128).save(path, optimize=True)
    return path


def _run(*arguments: object) -> None:
    if flt_mol([str(x) for x in arguments]):
        raise SystemExit("flt-mol failed")


def draw_learning_curve(path: Path) -> Path:
    """The learning curve of the quick start, which takes some minutes."""
    folder = Path(mkdtemp()) / "quickstart"
    _run("train", "quickstart", f"output={folder}")
    return _shrink(folder / "learning_curve.png", path)


@cache
def _evaluation() -> Path:
    folder = Path(mkdtemp())
    splits = ["--split", "val_id", "--split", "val_ood_ads"]
    _run("evaluate", "flt-small", *splits, "--output", folder)
    page = folder / "report.html"
    page.write_text(page.read_text("utf-8").replace(f"{Path(__file__).parents[2]}/", ""), "utf-8")
    return folder


def draw_parity(path: Path) -> Path:
    """Predictions of flt-small against targets, on two splits."""
    return _shrink(_evaluation() / "parity.png", path)


def draw_report(path: Path) -> Path:
    """The top of its report, as chromium shows it."""
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1250,1400"]
    page = (_evaluation() / "report.html").as_uri()
    shot = _evaluation() / "report.png"
    browser = shutil.which("chromium") or "google-chrome"
    subprocess.run(
        [browser, *options, f"--screenshot={shot}", page], check=True, stderr=subprocess.DEVNULL
    )
    return _shrink(shot, path)


def draw_relaxation(path: Path) -> Path:
    """O on Pt(111) relaxed by emt-forces, and the energy of EMT, its method of training."""
    slab = fcc111("Pt", (2, 2, 3), vacuum=7.0)
    add_adsorbate(slab, "O", 1.8, "bridge", offset=0.1)
    slab = tag_slab(slab, adsorbate="O", surface="half", fix=True)
    frames = relax_structures("emt-forces", [from_ase(slab)])[0]
    model = [atoms.get_potential_energy() for atoms in frames]
    figure = new_figure(9.0, 3.2)
    first, last, curve = figure.subplots(1, 3, width_ratios=(1, 1, 1.6))
    for axis, atoms, title in ((first, frames[0], "initial"), (last, frames[-1], "relaxed")):
        plot_atoms(atoms, axis, rotation="-80x,20y,0z")
        axis.set_axis_off()
        axis.set_title(title)
    true = []
    for atoms in frames:
        atoms.calc = EMT()
        true.append(atoms.get_potential_energy())
    curve.plot([e - model[-1] for e in model], ".-", color=BLUE, label="emt-forces")
    curve.plot([e - true[-1] for e in true], ".-", color=ORANGE, label="EMT, same frames")
    curve.set(xlabel="step", ylabel="energy − last (eV)")
    curve.legend(frameon=False)
    clean(curve)
    return save(figure, path)


DRAWINGS = {
    "overview": draw_overview,
    "spectra": draw_spectra,
    "learned_masks": draw_learned_masks,
    "local_masks": draw_local_masks,
    "attention_matrices": draw_attention_matrices,
    "spectral_filter": draw_spectral_filter,
    "learning_curve": draw_learning_curve,
    "parity": draw_parity,
    "report": draw_report,
    "relaxation": draw_relaxation,
}


def main() -> None:
    """Draw all figures, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    docs = Path(__file__).parents[2] / "docs/images"
    parser.add_argument("--folder", type=Path, default=docs)
    parser.add_argument("--only", nargs="+", choices=list(DRAWINGS), default=list(DRAWINGS))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.only:
        path = DRAWINGS[name](given.folder / f"{name}.png")
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
