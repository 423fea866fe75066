"""IS2RE: from the initial structure to the energy after relaxation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

from flt_mol.functional.groups import sum_per_system
from flt_mol.models.build import build_encoder
from flt_mol.models.checks import check_model
from flt_mol.models.config import (
    EnergyConfig,
    ImageConfig,
    PairConfig,
    RPEConfig,
    SpectralConfig,
)
from flt_mol.models.geometry import Geometry
from flt_mol.models.normalizer import Normalizer
from flt_mol.models.passes import Passes
from flt_mol.models.stored import CONFIG_KEY, add_config, drop_config, stored_config
from flt_mol.nn.embedding import MAX_ATOMIC_NUMBER, AtomEmbedding, AtomError, check_elements
from flt_mol.nn.heads import DisplacementHead, EnergyHead
from flt_mol.nn.transformer import BlockGeometry
from flt_mol.structures import Structures

__all__ = [
    "CONFIG_KEY",
    "EnergyConfig",
    "EnergyModel",
    "ImageConfig",
    "PairConfig",
    "RPEConfig",
    "SpectralConfig",
]


class EnergyModel(nn.Module):
    """Adsorption energy of each system, in eV; and, where asked for, what else its atoms do.

    Embedding of elements, tags and surroundings → blocks (`nn.FLTBlock`) → Σ over atoms, weighted
    per tag → mean + std · ŷ. With `recycles` the blocks are applied again to their own output, and
    every pass is read out (Choromanski, Li et al. 2024, appendix: four passes); with
    ``feedback="positions"`` free atoms are moved by the displacement predicted so far, and pairs
    and waves follow. Fixed atoms never move.

    **What energies do not depend on**: the order of atoms, and translations, always. Rotations
    (`rotation_invariant`) and the choice of periodic images (`sees_images`), unless positions
    enter through the sampled RPE, the paper's mode. Whether a supercell gives the same energy per
    atom (`supercell_consistent`) needs attention that goes by no count of atoms, hence neither
    "auto" nor the pair correction, and spectral filters without `max_vectors`. Rotations of *open*
    directions and vacuum keep to what `nn.SpectralFilter` says.

    Args:
        config: hyper-parameters.

    Raises:
        ValueError: settings that cannot work, as of `flt_mol.models.checks.check_model`.

    Attributes:
        cutoff: Å, of the neighbour pairs it needs; batches that carry such pairs
            (`Structures.with_pairs`) spare it the search. None for models without.
        sees_images: whether periodic images of atoms count; if not, `predict` warns of cells that
            are narrower than any slab.
        rotation_invariant: whether energies are.
        trained_on: what a checkpoint says of the training systems, if it does: "systems", how many;
            "energy_median", eV; "most_atoms" of one system.
        supercell_consistent: whether a repeated cell repeats the energy, less the normaliser's mean
            (readouts "tags" and "sum"), or keeps it ("mean").

    Example:
        >>> model = EnergyModel(EnergyConfig(embed_dim=16, num_layers=1))
        >>> water = Structures.single([8, 1, 1], [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
        >>> model(water)["energy"].shape
        torch.Size([1])
    """

    elements_seen: Tensor

    def __init__(self, config: EnergyConfig | None = None) -> None:
        super().__init__()
        config = EnergyConfig() if config is None else config
        check_model(config)
        self.config = config = deepcopy(config)  # the caller may go on changing theirs
        generator = torch.Generator().manual_seed(config.seed)
        self.embedding = AtomEmbedding(config.embed_dim)
        self.encoder = build_encoder(config, generator)
        self.geometry = Geometry(config, generator)
        energies = [name for name in config.outputs if name != "displacement"]
        self.head = EnergyHead(
            config.embed_dim, len(energies), readout=config.readout, norm=config.head_norm
        )
        self.displacement_head = _displacement_head(config, generator)
        self.normalizer = Normalizer()
        self.normalizer_initial = Normalizer() if "energy_initial" in energies else None
        self.register_buffer("elements_seen", torch.zeros(MAX_ATOMIC_NUMBER + 1, dtype=torch.bool))
        self.trained_on: dict[str, float] = {}
        self.register_state_dict_post_hook(add_config)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(drop_config)  # type: ignore[no-untyped-call]
        self.float()  # whatever torch's default dtype is

    @property
    def cutoff(self) -> float | None:
        """Å, of the neighbour pairs it needs; None where it needs none."""
        return self.config.cutoff

    @property
    def sees_images(self) -> bool:
        """Whether atoms may be moved by lattice vectors, and narrow cells are what they are."""
        seeing = (self.config.spectral, self.config.pairs, self.config.images)
        return self.config.rpe is None and any(part is not None for part in seeing)

    @property
    def rotation_invariant(self) -> bool:
        """Whether turning a system and its cell leaves energies alone.

        To rounding; with a spectral filter not quite for molecules and clusters without distinct
        principal axes (`nn.SpectralFilter`): 1e-5 eV for CH4, up to 3e-3 eV for an octahedron of
        231 atoms that are all an adsorbate's (docs/models.md).
        """
        return self.config.rpe is None

    @property
    def supercell_consistent(self) -> bool:
        """Whether a supercell gives the multiple of the energy, or the same one for "mean".

        But for what a system without atoms has, the mean that the normaliser adds.
        """
        corrected = self.config.pairs is not None and self.config.pairs.correction
        plain = self.config.attention != "auto" or self.config.images is not None
        spectral = self.config.spectral
        budget = spectral is not None and spectral.max_vectors is not None
        return self.config.rpe is None and plain and not corrected and not budget

    def forward(self, structures: Structures, *, embeddings: bool = False) -> dict[str, Tensor]:
        """What the model says of B systems with N atoms.

        Args:
            structures: pairs they carry are used if they are for this model's cutoff.
            embeddings: whether features are given, too.

        Returns:
            ``"energy"`` (B,) float32, eV. Where the model has these outputs ``"energy_initial"``
            (B,) float32, eV, the adsorption energy before relaxation, and ``"displacement"``
            (N, 3) float32, Å, relaxed − initial. Where there are K > 1 passes also
            ``"energy_passes"`` (K, B), ``"energy_initial_passes"``, ``"displacement_passes"``
            (K, N, 3), of which the last is the one above. With `embeddings`
            ``"atom_embeddings"`` (N, C) and their sums ``"system_embeddings"`` (B, C).

        Raises:
            ValueError: something that is not `Structures`; an atom whose number is not 1 to 118 or
                whose tag not 0 to 2; cells that are singular along periodic axes, positions that
                are not finite, or a system too large for the spectral filters
                (`models.limits.check_systems` tells before); by its sid.
        """
        if not isinstance(structures, Structures):
            raise ValueError(
                f"expected Structures, got a {type(structures).__name__}: convert ASE's atoms with "
                "flt_mol.data.from_ase, PyG's graphs with from_pyg"
            )
        passes = self._passes(structures)
        out = passes.outputs()
        if embeddings:
            atoms = passes.features
            out["atom_embeddings"] = atoms
            out["system_embeddings"] = sum_per_system(
                atoms.to(torch.promote_types(atoms.dtype, torch.float32)), structures.ptr
            )
        return out

    def energies(
        self, atomic_numbers: Tensor, positions: Tensor, tags: Tensor, ptr: Tensor
    ) -> Tensor:
        """Energies (B,) float32 eV; the arguments are the fields of `Structures`.

        Raises:
            ValueError: a model that looks at cells or pairs: it needs `Structures`; or atoms that
                are none.
        """
        config = self.config
        if self.cutoff is not None or config.spectral is not None or len(config.outputs) > 1:
            raise ValueError(
                "this model looks at cells or neighbour pairs, or has more outputs than the "
                "energy: call model(structures)"
            )
        x = self.embedding(atomic_numbers, tags)
        # Positions keep their precision whatever that of the weights: they are centred first.
        x = self.encoder(x, positions, ptr)
        energy: Tensor = self.normalizer.denormalize(self.head(x, tags, ptr))
        return energy

    def _passes(self, structures: Structures) -> Passes:
        """Run the stack; collect what every pass reads out."""
        passes = Passes(self.config.outputs, self.normalizer, self.normalizer_initial)
        start = self._embedded(structures)
        x, geometry = self.geometry(structures, structures.positions, self.encoder, start)
        surroundings = x
        for index in range(self.config.recycles):
            if index and self.config.feedback == "positions":
                now, geometry = self._moved(structures, passes.moved(structures.positions), start)
                # Features go on; what is new is what the surroundings add to them.
                x, surroundings = x + (now - surroundings), now
            x = self.encoder.once(x, structures.ptr, geometry)
            step = None
            if self.displacement_head is not None:
                step = self.displacement_head(x, geometry.local, structures.fixed)
            passes.read(self.head(x, structures.tags, structures.ptr), step, self.config.feedback)
        passes.features = x
        return passes

    def _moved(
        self, structures: Structures, positions: Tensor, start: Tensor
    ) -> tuple[Tensor, BlockGeometry]:
        """First features and geometry of positions (N, 3) that a pass of this model predicted."""
        try:
            found: tuple[Tensor, BlockGeometry] = self.geometry(
                structures, positions, self.encoder, start
            )
        except ValueError as error:
            farthest = (positions.detach() - structures.positions).abs().max()
            raise ValueError(
                f"{error} (not as given, but where an earlier pass of the model moves atoms to, "
                f"by up to {float(farthest):.3g} Å: its weights are unfit, or grew too large)"
            ) from None
        return found

    def _embedded(self, structures: Structures) -> Tensor:
        try:
            x: Tensor = self.embedding(structures.atomic_numbers, structures.tags)
        except AtomError as error:
            b = int(structures.system[error.row])
            row = error.row - int(structures.ptr[b])
            raise ValueError(
                f"sid {structures.sid[b]}: atom {row} (counted from 0) has {error.reason}"
            ) from None
        return x

    @property
    def normalizers(self) -> dict[str, Normalizer]:
        """Of each energy among the outputs, by its name."""
        found = {"energy": self.normalizer, "energy_initial": self.normalizer_initial}
        return {name: part for name, part in found.items() if part is not None}

    def prepare(self, structures: Structures) -> None:
        """Take mean and spread of the targets, and the elements seen, from the training data.

        Raises:
            ValueError: a target is missing.
        """
        for name, normalizer in self.normalizers.items():
            target = getattr(structures, name)
            if target is None:
                raise ValueError(f"the structures have no {name}, which this model is to predict")
            normalizer.fit(target)
        self.mark_seen(structures.atomic_numbers)

    def mark_seen(self, atomic_numbers: Tensor | Iterable[int]) -> None:
        """Note elements as trained on; predictions for others deserve a warning.

        Raises:
            ValueError: atomic numbers that are not 1 to 118.
        """
        numbers = torch.as_tensor(
            atomic_numbers if isinstance(atomic_numbers, Tensor) else list(atomic_numbers)
        )
        if not numbers.numel():
            return
        check_elements(numbers)
        self.elements_seen[numbers.to(self.elements_seen.device, torch.int64)] = True

    @staticmethod
    def config_of(state_dict: Mapping[str, Tensor]) -> EnergyConfig:
        """The configuration that a state dict of this class carries.

        Raises:
            ValueError: it carries none.
        """
        return stored_config(state_dict)


def _displacement_head(config: EnergyConfig, generator: torch.Generator) -> DisplacementHead | None:
    if "displacement" not in config.outputs or config.pairs is None:
        return None
    return DisplacementHead(config.embed_dim, config.pairs.num_basis, generator=generator)
