import pytest
import torch

from flt_mol.analysis.layer_figures import draw_attention_matrices, draw_spectral_filter
from flt_mol.analysis.mask_figures import (
    draw_learned_masks,
    draw_local_masks,
    draw_spectra,
    fit_mask,
    neighbour_shells,
)
from flt_mol.nn.frequencies import GaussianFrequencies
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectrum import GaussianSpectrum, ShellSpectrum

pytest.importorskip("matplotlib")


def make_rpe(heads=2):
    return FourierRPE(GaussianSpectrum(heads, 4), GaussianFrequencies(8))


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: draw_spectra(path, steps=2),
        lambda path: draw_learned_masks(make_rpe(), make_rpe(), path),
        lambda path: draw_learned_masks(make_rpe(1), make_rpe(1), path),
        lambda path: draw_local_masks(path, num_frequencies=8),
        lambda path: draw_attention_matrices(path, length=8),
        lambda path: draw_spectral_filter(path, steps=2),
    ],
)
def test_pictures_are_small_png_files(draw, tmp_path):
    path = draw(tmp_path / "picture.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 150_000


def test_a_fit_finds_a_mask_of_its_own_family():
    def spectrum(seed):
        return ShellSpectrum(1, 3, generator=torch.Generator().manual_seed(seed))

    r = torch.linspace(0, 6, 61)
    with torch.no_grad():
        target = spectrum(1).mask(torch.stack([r, 0 * r, 0 * r], -1))[:, 0]
    error = fit_mask(spectrum(2), r, target, steps=400)
    assert error < 0.02 * target.abs().max()


def test_the_target_marks_neighbours():
    values = neighbour_shells(torch.tensor([0.0, 2.56, 3.61, 7.0]))
    assert values[0] < 0 < values[2] < values[1]
    assert values[3].abs() < 1e-6
