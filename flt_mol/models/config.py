"""Every hyper-parameter of an energy model: what `models/NAME/model.yaml` holds."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

ATTENTION = ("linear", "exact", "auto", "none")
OUTPUTS = ("energy", "energy_initial", "displacement")
FEEDBACK = ("features", "positions")
IMAGE_MASKS = ("gaussian", "centred")


@dataclass
class RPEConfig:
    """The relative positional encoding: its spectrum g and where the frequencies come from.

    Attributes:
        num_terms: T, Gaussians of the spectrum per head.
        form: "amplitude" (f(0) = Σ a_t, the better conditioned) or "weight" (the paper's w_t).
        sigma_min: Å, smallest initial width in real space.
        sigma_max: Å, largest initial width in real space.
        num_frequencies: R.
        frequency_sigma_min: 1/Å, smallest initial spread of a frequency.
        frequency_sigma_max: 1/Å, largest.
        learned_sigma: whether that spread is learned (the draw stays fixed).
        split: "one_sided" or "symmetric", how ρ is given to Φ and Ψ.
    """

    num_terms: int = 16
    form: str = "amplitude"
    sigma_min: float = 0.7
    sigma_max: float = 6.0
    num_frequencies: int = 16
    frequency_sigma_min: float = 0.04
    frequency_sigma_max: float = 0.16
    learned_sigma: bool = True
    split: str = "one_sided"


@dataclass
class SpectralConfig:
    """A spectral filter in every block, see `nn.SpectralFilter`; waves are shared by all.

    Attributes:
        num_heads: H, filters per block; a divisor of embed_dim.
        k_max: cycles/Å, cutoff of the spectrum. Refused where, with this padding, a slab's cell of
            10 × 10 × 30 Å or a molecule of 5 Å would have more than 1e5 waves: above 1.9.
        sigma_max: Å, the width a filter may have.
        num_basis: T, functions of the spectrum.
        padding: Å of vacuum kept in open directions; null is 4 sigma_max.
        max_vectors: at most so many waves per system, the longest ones, for time and memory in
            proportion to the atoms where cells are very large; null is all up to k_max. Where it
            takes hold, what is seen grows blurred with the cell, and supercells are no longer the
            same.
    """

    num_heads: int = 4
    k_max: float = 0.45
    sigma_max: float = 2.5
    num_basis: int = 8
    padding: float | None = None
    max_vectors: int | None = None


@dataclass
class PairConfig:
    """What is learned on neighbour pairs; the basis is shared by all blocks.

    Attributes:
        cutoff: Å.
        num_basis: T, Gaussians over [0, cutoff].
        filter: whether each block has a `nn.LocalFilter`.
        num_filters: channels of its radial sums; null is embed_dim.
        norm: whether it takes normalised features; false for few blocks and passes only.
        density: whether a local filter of the elements is added to the embedding.
        vectors: vector channels of that density, where forces show; 0 for none.
        filter_vectors: vector channels of the blocks' local filters; 0 for none.
        vector_blocks: how many blocks have them, the last ones; null is all.
        vector_basis: T', Gaussians of the vectors.
        vector_dropout: probability, on lengths and products of vectors.
        pair_types: whether distances are transformed per pair of elements.
        correction: whether attention is corrected on pairs, see `nn.PairCorrection`.
    """

    cutoff: float = 5.0
    num_basis: int = 32
    filter: bool = True
    num_filters: int | None = None
    norm: bool = True
    density: bool = True
    vectors: int = 0
    filter_vectors: int = 0
    vector_blocks: int | None = None
    vector_basis: int = 12
    vector_dropout: float = 0.0
    pair_types: bool = False
    correction: bool = False


@dataclass
class ImageConfig:
    """Exact attention whose keys are periodic images, as 3D-Graphormer's; quadratic in neighbours.

    Attributes:
        cutoff: Å.
        num_basis: Gaussians of the mask.
        mask: "gaussian", zero-centred widths as of an RPE's spectrum, or "centred", Gaussians with
            centres and a small net per head (3D-Graphormer's bias).
        pair_types: whether distances are transformed per pair of elements; "gaussian" refuses it.
        density: whether the sum of an atom's Gaussians is added to its embedding, as 3D-Graphormer
            does; "gaussian" refuses it.
    """

    cutoff: float = 5.0
    num_basis: int = 32
    mask: str = "centred"
    pair_types: bool = True
    density: bool = True


@dataclass
class EnergyConfig:
    """Every hyper-parameter of an EnergyModel.

    Attributes:
        embed_dim: C, width of the atoms' features.
        num_heads: H.
        num_layers: blocks in the stack.
        recycles: passes of the stack; every pass is read out.
        ffn_dim: hidden width of the feed-forward nets.
        num_features: M, random features per head.
        redraw_every: training steps after which random features, and sampled frequencies whose σ is
            not learned, are drawn anew for training; evaluation keeps those that are saved. None
            never does.
        attention: "linear", "exact" for the quadratic twin with the same parameters, "auto" for the
            faster of the two by size, or "none".
        dropout: probability, on the outputs of attention and feed-forward nets.
        rpe: the sampled relative positional encoding; None for a Performer without positions.
        seed: of weights and random features that are drawn on purpose, frequencies among them; the
            embedding, feed-forward nets and heads begin from torch's global random numbers. A run
            adds `training.seed`.
        far_scale: of the initial weights with which attention and spectral filters are added to
            features. Below 1, local sums come first, which energies of given structures gain from.
        far_blocks: how many blocks have attention and spectral filters, the last ones; None is all.
        feature_map: φ of linear attention, a name in `nn.FEATURE_MAPS`.
        spectral: spectral filters, or None.
        pairs: what is learned on neighbour pairs, or None.
        images: exact attention over periodic images, or None.
        readout: "tags", Σ over atoms weighted per tag; "sum", extensive; or "mean", intensive.
        head_norm: whether heads normalise features first; without it they read off densities.
        outputs: heads to build, of "energy", "energy_initial" and "displacement".
        feedback: what a pass hands to the next: "features", or also "positions", moved by the
            displacement predicted so far, which needs more than one pass.
    """

    embed_dim: int = 64
    num_heads: int = 4
    num_layers: int = 3
    recycles: int = 1
    ffn_dim: int = 128
    num_features: int = 64
    redraw_every: int | None = None
    attention: str = "linear"
    dropout: float = 0.0
    rpe: RPEConfig | None = field(default_factory=RPEConfig)
    seed: int = 0
    far_scale: float = 1.0
    far_blocks: int | None = None
    feature_map: str = "softmax"
    spectral: SpectralConfig | None = None
    pairs: PairConfig | None = None
    images: ImageConfig | None = None
    readout: str = "tags"
    head_norm: bool = True
    outputs: list[str] = field(default_factory=lambda: ["energy"])
    feedback: str = "features"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EnergyConfig:
        """From plain data, as read from yaml or a checkpoint.

        Raises:
            ValueError: an unknown key, naming it and the known ones; or no mapping.
        """
        if not isinstance(values, Mapping):
            raise ValueError(
                f"model settings are {values!r}, expected a mapping of keys to values; "
                "flt_mol.models.named_config takes a name"
            )
        settings = _known(cls, values)
        for name, schema in PARTS.items():
            part = settings.get(name)
            if isinstance(part, Mapping):
                settings[name] = schema(**_known(schema, part))
        return cls(**settings)

    @property
    def cutoff(self) -> float | None:
        """Å within which pairs are needed; None where no part looks at pairs."""
        found = [part.cutoff for part in (self.pairs, self.images) if part is not None]
        return max(found, default=None)


PARTS: dict[str, type] = {
    "rpe": RPEConfig,
    "spectral": SpectralConfig,
    "pairs": PairConfig,
    "images": ImageConfig,
}


def _known(schema: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(schema)}
    unknown = sorted(map(str, set(values) - names))
    if unknown:
        near = difflib.get_close_matches(unknown[0], names, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"unknown model setting {', '.join(unknown)}; {meant}known: {', '.join(sorted(names))}"
        )
    return dict(values)
