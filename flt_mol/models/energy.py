"""IS2RE: from the initial structure to the energy after relaxation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.models.normalizer import Normalizer
from flt_mol.nn.attention import FLTAttention
from flt_mol.nn.embedding import MAX_ATOMIC_NUMBER, AtomEmbedding
from flt_mol.nn.frequencies import GaussianFrequencies
from flt_mol.nn.heads import EnergyHead
from flt_mol.nn.rpe import FourierRPE
from flt_mol.nn.spectrum import GaussianSpectrum
from flt_mol.nn.transformer import FLTBlock, FLTEncoder
from flt_mol.structures import Structures

CONFIG_KEY = "config_json"


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
class EnergyConfig:
    """Every hyper-parameter of an EnergyModel; what `models/NAME/model.yaml` holds.

    Attributes:
        embed_dim: C, width of the atoms' features.
        num_heads: H.
        num_layers: blocks in the stack.
        recycles: how often the stack is applied to its own output.
        ffn_dim: hidden width of the feed-forward nets.
        num_features: M, random features per head.
        attention: "linear", or "exact" for the quadratic twin with the same parameters.
        dropout: probability, on the outputs of attention and feed-forward nets.
        rpe: the relative positional encoding; None for a Performer without positions.
        seed: of the random features and frequencies.
    """

    embed_dim: int = 64
    num_heads: int = 4
    num_layers: int = 3
    recycles: int = 1
    ffn_dim: int = 128
    num_features: int = 64
    attention: str = "linear"
    dropout: float = 0.0
    rpe: RPEConfig | None = field(default_factory=RPEConfig)
    seed: int = 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EnergyConfig:
        """From plain data, as read from yaml or a checkpoint.

        Raises:
            ValueError: an unknown key, naming it and the known ones.
        """
        rpe = values.get("rpe", cls().rpe)
        if isinstance(rpe, Mapping):
            rpe = RPEConfig(**_known(RPEConfig, rpe))
        return cls(**{**_known(cls, values), "rpe": rpe})


def _known(schema: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(schema)}
    unknown = sorted(set(values) - names)
    if unknown:
        raise ValueError(
            f"unknown model setting {', '.join(unknown)}; known: {', '.join(sorted(names))}"
        )
    return dict(values)


class EnergyModel(nn.Module):
    """Adsorption energy of each system, in eV.

    Embedding of elements and tags → FLT encoder → Σ over atoms, weighted per tag → mean + std · ŷ.
    In the paper's mode (Choromanski, Li et al. 2024, section 5.3) positions enter through the
    sampled RPE alone: energies are invariant to translations of the whole system and to the order
    of atoms. They are **not** invariant to rotations, and moving atoms by lattice vectors changes
    them; periodic images are not seen.

    Args:
        config: hyper-parameters.

    Attributes:
        sees_images: whether periodic images of atoms count; if not, `predict` warns of cells that
            are narrower than any slab.

    Example:
        >>> model = EnergyModel(EnergyConfig(embed_dim=16, num_layers=1))
        >>> water = Structures.single([8, 1, 1], [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
        >>> model(water)["energy"].shape
        torch.Size([1])
    """

    elements_seen: Tensor
    sees_images = False

    def __init__(self, config: EnergyConfig | None = None) -> None:
        super().__init__()
        self.config = config if config is not None else EnergyConfig()
        self.embedding = AtomEmbedding(self.config.embed_dim)
        self.encoder = _build_encoder(self.config)
        self.head = EnergyHead(self.config.embed_dim)
        self.normalizer = Normalizer()
        self.register_buffer("elements_seen", torch.zeros(MAX_ATOMIC_NUMBER + 1, dtype=torch.bool))
        self.register_state_dict_post_hook(_add_config)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_drop_config)  # type: ignore[no-untyped-call]
        self.float()  # whatever torch's default dtype is

    def forward(self, structures: Structures) -> dict[str, Tensor]:
        """Structures of B systems to ``{"energy": (B,) float32 eV}``."""
        fields = structures.atomic_numbers, structures.positions, structures.tags, structures.ptr
        return {"energy": self.energies(*fields)}

    def energies(
        self, atomic_numbers: Tensor, positions: Tensor, tags: Tensor, ptr: Tensor
    ) -> Tensor:
        """Energies (B,) float32 eV; the arguments are the fields of `Structures`."""
        x = self.embedding(atomic_numbers, tags)
        # Positions keep their precision whatever that of the weights: they are centred first.
        x = self.encoder(x, positions, ptr)
        energy: Tensor = self.normalizer.denormalize(self.head(x, tags, ptr))
        return energy

    def mark_seen(self, atomic_numbers: Tensor | Iterable[int]) -> None:
        """Note elements as trained on; predictions for others deserve a warning."""
        numbers = torch.as_tensor(
            atomic_numbers if isinstance(atomic_numbers, Tensor) else list(atomic_numbers)
        )
        self.elements_seen[numbers.to(self.elements_seen.device, torch.int64)] = True

    @staticmethod
    def config_of(state_dict: Mapping[str, Tensor]) -> EnergyConfig:
        """The configuration that a state dict of this class carries.

        Raises:
            ValueError: it carries none.
        """
        if CONFIG_KEY not in state_dict:
            raise ValueError(f"these weights carry no model configuration ('{CONFIG_KEY}')")
        text = bytes(state_dict[CONFIG_KEY].to(torch.uint8).tolist()).decode()
        return EnergyConfig.from_dict(json.loads(text))


def _add_config(model: EnergyModel, weights: Any, prefix: str, metadata: Any) -> None:
    """Weights describe themselves: a bare state dict is enough to build the model again."""
    text = json.dumps(asdict(model.config), sort_keys=True).encode()
    weights[f"{prefix}{CONFIG_KEY}"] = torch.tensor(list(text), dtype=torch.uint8)


def _drop_config(model: EnergyModel, weights: Any, prefix: str, *rest: Any) -> None:
    weights.pop(f"{prefix}{CONFIG_KEY}", None)


def _build_encoder(config: EnergyConfig) -> FLTEncoder:
    generator = torch.Generator().manual_seed(config.seed)
    rpe = None if config.rpe is None else _build_rpe(config.rpe, config.num_heads, generator)
    blocks = [
        FLTBlock(
            FLTAttention(
                config.embed_dim,
                config.num_heads,
                num_features=config.num_features,
                position_dim=0 if rpe is None else rpe.num_features,
                dropout=config.dropout,
                mode=config.attention,
                generator=generator,
            ),
            config.ffn_dim,
            config.dropout,
        )
        for _ in range(config.num_layers)
    ]
    return FLTEncoder(blocks, rpe, config.recycles)


def _build_rpe(config: RPEConfig, num_heads: int, generator: torch.Generator) -> FourierRPE:
    spectrum = GaussianSpectrum(
        num_heads,
        config.num_terms,
        form=config.form,
        sigma_min=config.sigma_min,
        sigma_max=config.sigma_max,
        generator=generator,
    )
    frequencies = GaussianFrequencies(
        config.num_frequencies,
        sigma=(config.frequency_sigma_min, config.frequency_sigma_max),
        learned_sigma=config.learned_sigma,
        generator=generator,
    )
    return FourierRPE(spectrum, frequencies, split=config.split)
