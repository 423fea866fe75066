#!/usr/bin/env python
"""Draw the pictures of docs/ into docs/images."""

import argparse
from pathlib import Path

from flt_mol.analysis.layer_figures import draw_attention_matrices, draw_spectral_filter
from flt_mol.analysis.mask_figures import draw_learned_masks, draw_local_masks, draw_spectra
from flt_mol.models import EnergyModel
from flt_mol.models.checkpoint import load_model


def main() -> None:
    """Draw all of them, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "docs/images")
    parser.add_argument("--only", nargs="+", default=())
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    drawings = {
        "spectra": draw_spectra,
        "learned_masks": _draw_learned,
        "local_masks": draw_local_masks,
        "attention_matrices": draw_attention_matrices,
        "spectral_filter": draw_spectral_filter,
    }
    for name, draw in drawings.items():
        if not given.only or name in given.only:
            path = draw(given.folder / f"{name}.png")
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def _draw_learned(path: Path) -> Path:
    """The masks of the shipped model, before training and after."""
    model = load_model("emt_small")
    return draw_learned_masks(model.encoder.rpe, EnergyModel(model.config).encoder.rpe, path)


if __name__ == "__main__":
    main()
