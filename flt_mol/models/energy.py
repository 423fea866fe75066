"""IS2RE: from the initial structure to the energy after relaxation; or energies with forces."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.functional.groups import at_least_float32, outside, sum_per_system
from flt_mol.models.build import Geometry, build_encoder, check_systems, naming_sid, prepare_batch
from flt_mol.models.config import EnergyConfig
from flt_mol.models.forces import with_forces
from flt_mol.nn import BlockGeometry, ChargeHead, DisplacementHead, EnergyHead
from flt_mol.nn.embedding import MAX_ATOMIC_NUMBER, AtomEmbedding
from flt_mol.structures import Structures

_LARGE = 10_000  # atoms, from which on a look at the memory at hand costs nothing
CONFIG_KEY = "config_json"
"""Of the configuration in a state dict: JSON as a tensor of bytes, so that weights are enough."""


class Normalizer(nn.Module):
    """y = mean + std · ŷ + Σ_a r(Z_a), as buffers, so that a checkpoint carries them.

    `reference`, r (119,), eV by atomic number, is None but for models of total energies.

    Examples:
        >>> normalizer = Normalizer()
        >>> normalizer.fit(torch.tensor([1.0, 3.0]))
        >>> normalizer.denormalize(torch.tensor([0.0, 1.0]))
        tensor([2., 3.])
    """

    mean: Tensor
    std: Tensor
    reference: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("reference", None)
        self.register_buffer("mean", torch.zeros((), dtype=torch.float32))
        self.register_buffer("std", torch.ones((), dtype=torch.float32))

    def fit(self, targets: Any, shift: bool = True) -> None:
        """Take mean and population standard deviation of a tensor of targets, eV.

        Or those of an object with float `mean` and `std`. Without `shift` the mean is 0 and std the
        root mean square. Where all targets are equal, std is 1, with a warning.

        Raises:
            ValueError: no targets, or mean or standard deviation not finite in float32.
        """
        if isinstance(targets, Tensor):
            if not targets.numel():
                raise ValueError("a normaliser needs at least one target")
            values = targets.double()
            mean, std = float(values.mean()), float(values.std(correction=0))
        else:
            mean, std = targets.mean, targets.std
        if not shift:
            mean, std = 0.0, math.hypot(mean, std)
        if not max(abs(mean), std) <= torch.finfo(torch.float32).max:
            raise ValueError(f"targets: mean {mean:g}, standard deviation {std:g} eV, not finite")
        if std < 1e-6:
            warnings.warn("all targets are equal: the normaliser's std is set to 1", stacklevel=2)
            std = 1.0
        self.mean.fill_(mean)
        self.std.fill_(std)

    def denormalize(
        self, y: Tensor, atomic_numbers: Tensor | None = None, ptr: Tensor | None = None
    ) -> Tensor:
        """ŷ (B,) without unit to y in eV; float64 with `reference`, which needs the atoms."""
        y = self.mean + self.std * y
        if self.reference is None:
            return y
        assert atomic_numbers is not None
        assert ptr is not None
        return y + self.reference_energies(atomic_numbers, ptr)

    def set_reference(self, values: Any) -> None:
        """Take energies (119,) of the elements, eV, or those of zero."""
        self.reference = torch.as_tensor(values).to(self.mean)

    def reference_energies(self, atomic_numbers: Tensor, ptr: Tensor) -> Tensor:
        """Σ_a r(Z_a) (B,), eV, in float64: totals are large."""
        assert self.reference is not None
        double = torch.float32 if ptr.device.type == "mps" else torch.float64
        return sum_per_system(self.reference[atomic_numbers].to(double), ptr)


class EnergyModel(nn.Module):
    """Adsorption energy of each system, in eV; optionally forces, initial energies, displacements.

    Embedding of elements, tags and surroundings → blocks (`nn.FLTBlock`) → Σ over atoms, weighted
    per tag → mean + std · ŷ. With `recycles` > 1 the blocks are applied again to their own output,
    and every recycle is read out (Choromanski, Li et al. 2024, appendix: four); with
    ``feedback="positions"`` free atoms are moved by the displacement predicted so far, and pairs
    and plane waves follow. Fixed atoms never move. A model with the output "forces" gives the
    energy of the positions shown, and forces −∂E/∂r.

    **Invariances**: the order of atoms, and translations, always. Rotations
    (`rotation_invariant`) and the choice of periodic images (`sees_images`), unless positions
    enter through the sampled RPE, the paper's mode; supercells (`supercell_consistent`) unless
    a part depends on the number of atoms.

    Args:
        config: hyper-parameters, copied.

    Raises:
        ValueError: arguments of the RPE's families that cannot work.

    Attributes:
        trained_on: what a checkpoint says of the training systems, if it does: "systems", how many;
            "energy_median", eV; "most_atoms" of one system.

    Examples:
        >>> model = EnergyModel(EnergyConfig(embed_dim=16, num_layers=1))
        >>> water = Structures.single([8, 1, 1], [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
        >>> model(water)["energy"].shape
        torch.Size([1])
    """

    elements_seen: Tensor

    def __init__(self, config: EnergyConfig | None = None) -> None:
        super().__init__()
        if not isinstance(config, EnergyConfig | None):
            kind = type(config).__name__
            raise ValueError(f"expected an EnergyConfig, got a {kind}: see named_config")
        self.config = config = EnergyConfig() if config is None else deepcopy(config)
        generator = torch.Generator().manual_seed(config.seed)
        self.embedding = AtomEmbedding(config.embed_dim)
        self.encoder = build_encoder(config, generator)
        self.geometry = Geometry(config, generator)
        self._heads = [name for name in config.outputs if name != "forces"]
        self._energies = [name for name in self._heads if name != "displacement"]
        self.head = EnergyHead(
            config.embed_dim, len(self._energies), readout=config.readout, norm=config.head_norm
        )
        self.charge_head = None
        if (waves := config.spectral) is not None and waves.charges:
            settings = waves.k_max, waves.sigma_max, waves.num_basis
            counts = config.embed_dim, len(self._energies), waves.charges
            assert config.pairs is not None  # by the rules
            self.charge_head = ChargeHead(*counts, settings, config.pairs.cutoff, generator)
        self.displacement_head = None
        if "displacement" in config.outputs and config.pairs is not None:
            sizes = config.embed_dim, config.pairs.num_basis
            self.displacement_head = DisplacementHead(*sizes, generator=generator)
        self.normalizer = Normalizer()
        self.normalizer_initial = Normalizer() if "energy_initial" in self._energies else None
        self.register_buffer("elements_seen", torch.zeros(MAX_ATOMIC_NUMBER + 1, dtype=torch.bool))
        self.trained_on: dict[str, float] = {}
        self.register_state_dict_post_hook(_add_config)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_drop_config)  # type: ignore[no-untyped-call]
        self.float()  # with any default dtype of torch

    @property
    def cutoff(self) -> float | None:
        """Å, of the neighbour pairs it needs (`Structures.with_pairs`); None without."""
        return self.config.cutoff

    @property
    def sees_images(self) -> bool:
        """Whether periodic images are seen: narrow cells need not be repeated."""
        seeing = (self.config.spectral, self.config.pairs, self.config.images)
        return self.config.rpe is None and any(part is not None for part in seeing)

    @property
    def rotation_invariant(self) -> bool:
        """Whether rotating a system and its cell leaves energies alone, to rounding.

        With a spectral filter not quite for clusters without distinct principal axes
        (`nn.SpectralFilter`): 1e-5 eV for CH4, 3e-3 eV for an octahedron of 231 atoms.
        """
        return self.config.rpe is None

    @property
    def supercell_consistent(self) -> bool:
        """Whether a supercell gives the multiple of ŷ, or the same one for "mean"."""
        config = self.config
        corrected = config.pairs is not None and config.pairs.correction
        plain = config.attention != "auto" or config.images is not None
        return config.rpe is None and plain and not corrected

    @property
    def normalizers(self) -> dict[str, Normalizer]:
        """Of each energy among the outputs, by its name."""
        found = {"energy": self.normalizer, "energy_initial": self.normalizer_initial}
        return {name: part for name, part in found.items() if part is not None}

    def reference_energies(self, structures: Structures) -> Tensor | None:
        """Energies (B,) float64, eV, of the elements, which are part of the energy, if any are."""
        normalizer, structures = self.normalizer, structures.to(self.elements_seen.device)
        if normalizer.reference is None:
            return None
        return normalizer.reference_energies(structures.atomic_numbers, structures.ptr).cpu()

    def forward(
        self, structures: Structures, *, embeddings: bool = False, stress: bool = False
    ) -> dict[str, Tensor]:
        """Outputs for B systems with N atoms.

        Args:
            structures: as `prepare_batch` gives them, else what is missing is found here.
            embeddings: whether features are given, too.
            stress: whether forces and stress are given, too (`with_forces`).

        Returns:
            ``"energy"`` (B,) float32, eV, or float64 with energies of elements in the normaliser.
            Where the model has these outputs ``"energy_initial"`` (B,), eV, the adsorption energy
            before relaxation, and ``"displacement"`` (N, 3) float32, Å, relaxed − initial, and
            ``"forces"`` (N, 3) float32, eV/Å, which break graphs; ``"stress"`` is (B, 3, 3), eV/Å³.
            Where there are K > 1 recycles also
            ``"energy_recycles"`` (K, B), ``"energy_initial_recycles"``, ``"displacement_recycles"``
            (K, N, 3), of which the last is the one above. With `embeddings`
            ``"atom_embeddings"`` (N, C) and their sums ``"system_embeddings"`` (B, C).

        Raises:
            ValueError: something that is not `Structures`; an atom whose number is not 1 to 118 or
                whose tag not 0 to 2; cells that are singular along periodic axes, positions that
                are not finite, or a system too large for the memory (`check` finds it before; here
                systems of 10,000 atoms and more are checked); the sid is named.
        """
        if not isinstance(structures, Structures):
            kind = type(structures).__name__
            raise ValueError(f"expected Structures, got a {kind}: see flt_mol.data.from_ase")
        if not torch.compiler.is_compiling() and structures.num_atoms > _LARGE:
            self.check(structures)
        if not (stress or "forces" in self.config.outputs):
            return self._outputs(structures, embeddings)
        run = outside(with_forces) if torch.compiler.is_compiling() else with_forces
        prepared = self.prepare_batch(structures)
        return run(lambda some: self._outputs(some, embeddings), prepared, stress=stress)

    def _outputs(self, structures: Structures, embeddings: bool) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {name: [] for name in self._heads}
        with naming_sid(structures):
            start = self.embedding(structures.atomic_numbers, structures.tags)
            x, geometry = self.geometry(structures, self.encoder, start)
        surroundings = x
        for index in range(self.config.recycles):
            if index and self.config.feedback == "positions":
                now, geometry = self._moved(structures, found["displacement"][-1].detach(), start)
                # Features are kept; what is new is what the surroundings add to them.
                x, surroundings = x + (now - surroundings), now
            x = self.encoder.once(x, structures.ptr, geometry)
            self._read(x, structures, geometry, found)
        out = {name: recycles[-1] for name, recycles in found.items()}
        if self.config.recycles > 1:
            out |= {f"{name}_recycles": torch.stack(parts) for name, parts in found.items()}
        if embeddings:
            out["atom_embeddings"] = x
            out["system_embeddings"] = sum_per_system(at_least_float32(x), structures.ptr)
        return out

    def prepare_batch(self, structures: Structures) -> Structures:
        """The batch with the pairs and reciprocal vectors that `forward` needs: for data loaders.

        Raises:
            ValueError: a system that is too large or whose numbers are not finite, by its sid.
        """
        return prepare_batch(self.geometry.needs, structures)

    def check(self, structures: Structures) -> None:
        """ValueError, with its sid, for a system that is too large for the memory at hand."""
        check_systems(self.config, structures, self.elements_seen.device)

    def prepare(self, structures: Structures) -> None:
        """Take mean and standard deviation of the targets, which must be there, and elements."""
        for name, normalizer in self.normalizers.items():
            target = getattr(structures, name)
            if target is None:
                raise ValueError(f"the structures have no {name}, which this model is to predict")
            normalizer.fit(target)
        self.mark_seen(structures.atomic_numbers)

    def mark_seen(self, atomic_numbers: Tensor | Sequence[int]) -> None:
        """Record elements as trained on; ValueError for atomic numbers that are not 1 to 118."""
        numbers = torch.as_tensor(atomic_numbers, dtype=torch.int64)
        wrong = numbers[(numbers < 1) | (numbers > MAX_ATOMIC_NUMBER)]
        if len(wrong):
            raise ValueError(f"atomic number {int(wrong[0])}, expected 1 to {MAX_ATOMIC_NUMBER}")
        self.elements_seen[numbers.to(self.elements_seen.device)] = True

    def _read(
        self,
        x: Tensor,
        structures: Structures,
        geometry: BlockGeometry,
        found: dict[str, list[Tensor]],
    ) -> None:
        """Append one recycle's outputs, in eV and Å."""
        columns = self.head(x, structures.tags, structures.ptr).view(-1, len(self._energies))
        if self.charge_head is not None:
            assert geometry.plane_waves is not None
            assert geometry.local is not None
            where = geometry.plane_waves, geometry.local, structures.ptr
            columns = columns + self.charge_head(x, *where)
        for name, column in zip(self._energies, columns.unbind(-1), strict=True):
            normalizer = self.normalizers[name]
            energy = normalizer.denormalize(column, structures.atomic_numbers, structures.ptr)
            found[name].append(energy)
        if self.displacement_head is not None:
            step = self.displacement_head(x, geometry.local, structures.fixed)
            if self.config.feedback == "positions" and found["displacement"]:
                # Steps add up; the loss of a recycle is to teach its own.
                step = step + found["displacement"][-1].detach()
            found["displacement"].append(step)

    def _moved(
        self, structures: Structures, displacement: Tensor, start: Tensor
    ) -> tuple[Tensor, BlockGeometry]:
        """First features and geometry of the positions that a recycle predicted."""
        positions = (structures.positions + displacement).to(structures.positions.dtype)
        moved = structures.moved(positions)
        try:
            with naming_sid(moved):
                x, geometry = self.geometry(moved, self.encoder, start)
        except ValueError as error:
            far = float(displacement.abs().max())
            raise ValueError(f"{error} (a recycle moves atoms by up to {far:.3g} Å)") from None
        return x, geometry


def _add_config(model: Any, weights: Any, prefix: str, metadata: Any) -> None:
    text = json.dumps(model.config.model_dump(), sort_keys=True).encode()
    weights[f"{prefix}{CONFIG_KEY}"] = torch.tensor(list(text), dtype=torch.uint8)


def _drop_config(model: Any, weights: Any, prefix: str, *rest: Any) -> None:
    weights.pop(f"{prefix}{CONFIG_KEY}", None)
    add_buffers(model, weights, prefix)


def add_buffers(model: EnergyModel, weights: Mapping[str, Tensor], prefix: str = "") -> None:
    """Give `model` the buffers of `weights` that only some models have: reference energies."""
    for name in ("normalizer", "normalizer_initial"):
        part = getattr(model, name)
        if part is not None and f"{prefix}{name}.reference" in weights:
            part.set_reference([0.0] * (MAX_ATOMIC_NUMBER + 1))
