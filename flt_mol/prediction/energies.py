"""Energies of structures in memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flt_mol.data import StructuresDataset, open_dataset
from flt_mol.data.checks import Unusual, with_atom
from flt_mol.data.recipes import skipped_message
from flt_mol.files import some
from flt_mol.prediction.members import Members, load_members
from flt_mol.structures import Structures


@dataclass(frozen=True, eq=False)
class EnsembleEnergies:
    """Energies of B structures by the K members of an ensemble.

    Args:
        members: (K, B) float64, eV, in the order in which the members were given.

    Examples:
        >>> EnsembleEnergies(np.array([[-1.0, 2.0], [-3.0, 2.0]])).mean
        array([-2.,  2.])
    """

    members: NDArray[np.float64]

    @property
    def mean(self) -> NDArray[np.float64]:
        """(B,) float64, eV."""
        return np.asarray(self.members.mean(axis=0))

    @property
    def std(self) -> NDArray[np.float64]:
        """(B,) float64, eV: the standard deviation over the members, with K − 1 (ddof = 1)."""
        return np.asarray(self.members.std(axis=0, ddof=1))

    def __len__(self) -> int:
        """Number of structures B."""
        return int(self.members.shape[1])


def predict(
    source: Any,
    checkpoint: Any,
    batch_size: int = 32,
    *,
    device: str | torch.device | None = None,
    frames: str | None = None,
) -> Any:
    """Energies (B,) float64, eV, of all systems of `source`, in their order.

    Tags (0 below the surface, 1 surface, 2 adsorbate) and fixed atoms are read from the source: see
    `flt_mol.data.tag_slab`. Nothing in it is changed, and targets are ignored.

    Args:
        source: `ase.Atoms`, one or several; or anything that `flt_mol.open_dataset` takes or
            has opened.
        checkpoint: as of `load_members`.
        batch_size: structures per call of the model; it changes no energy beyond rounding.
        device: as `checkpoint`.
        frames: "first", "last" or "all" frames of a file; None takes the first of a relaxation.

    Returns:
        The energies; of an ensemble `EnsembleEnergies` with `mean`, `std`, `members`.

    Raises:
        ValueError: something that holds no structures, naming its place; a `batch_size` below 1;
            an energy that is not finite; no such checkpoint, or no possible ensemble.

    Warns:
        UserWarning: once of each kind for all structures, `Unusual`, `unfit_for` and elements never
            trained on; tags like layer numbers; frames that are not predicted.
    """
    members = load_members(checkpoint, device)
    if isinstance(source, list | tuple) and not source:
        return predict_structures(members, [], batch_size)
    if not isinstance(source, StructuresDataset):
        source = open_quietly(source, frames=frames, check=members.check)
    return predict_structures(members, source.batches(), batch_size)


def open_quietly(source: Any, frames: str | None = None, **options: Any) -> StructuresDataset:
    """A data set without targets, and without a warning of sids that are not stored.

    Warns of skipped records, and of relaxations of which the first frame is taken unasked.
    """
    dataset = open_dataset(source, ignore_energy=True, frames=frames, **options)
    dataset.notes.seen.add("sid")
    if dataset.skipped:
        warnings.warn(skipped_message(dataset), stacklevel=3)
    files = [file for file in dataset.files() if file.options.frames is None]
    if cut := [file.path for file in files if file.is_relaxation]:
        text = f"{len(cut)} relaxation{'s: their' if cut[1:] else ': its'} first frame is used"
        text += f"; --frames last or all takes others ({some(cut)})"
        warnings.warn(text, stacklevel=3)
    return dataset


def predict_structures(
    model: Any,
    structures: Iterable[Structures],
    batch_size: int = 32,
    *,
    progress: Callable[[int], None] | None = None,
    collect: Callable[[Structures, list[Any]], None] | None = None,
    **asked: bool,
) -> Any:
    """Energies (B,) float64, eV, of all systems of `structures`, in order.

    Args:
        model: a module or checkpoint, or a list or tuple of them for an ensemble.
        structures: batches of any number of systems, such as the items of a data set.
        batch_size: systems per call of the model.
        progress: called with the number of structures done after each batch.
        collect: called with each batch and all that the members gave for it.
        asked: further arguments of the models, such as ``embeddings=True``.

    Returns, raises, warns: as `predict`.
    """
    members = load_members(model)
    energies = [np.empty((len(members.models), 0))]
    unusual, elements = Unusual(), set[int]()
    with ExitStack() as stack:
        for member in members.models:
            stack.enter_context(evaluating(member))
        stack.enter_context(torch.inference_mode())
        for batch in batches(structures, batch_size):
            each = [model(prepared(model, batch), **asked) for model in members.models]
            parts = zip(each, members.labels, strict=True)
            energies.append(np.stack([_finite(*part, batch) for part in parts]))
            if collect is not None:
                collect(batch.to("cpu"), each)
            unusual.add(batch, unfit_for(members.models, batch, members))
            elements.update(batch.atomic_numbers.tolist())
            if progress is not None:
                progress(unusual.systems)
    unusual.warn(stacklevel=3)
    if unseen := {symbol for x in members.models for symbol in check_elements(x, elements)}:
        warnings.warn(UNSEEN.format(which=", ".join(sorted(unseen))), stacklevel=3)
    found = EnsembleEnergies(np.concatenate(energies, axis=1))
    return found if members.ensemble else found.members[0]


class MeanModel(nn.Module):
    """The mean energy of the members of an ensemble, as a model of its own."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self.models = nn.ModuleList(members.models)
        self.trained_on = getattr(members.models[0], "trained_on", {})
        seen = [getattr(model, "elements_seen", None) for model in members.models]
        known = [one.cpu() for one in seen if one is not None]
        self.elements_seen = torch.stack(known).all(dim=0) if known else None

    def forward(self, batch: Structures) -> dict[str, Tensor]:
        """{"energy": (B,) float64, eV}."""
        each = [energies_of(model(prepared(model, batch)), batch) for model in self.models]
        return {"energy": torch.from_numpy(np.mean(each, axis=0))}


def _finite(output: Any, name: str, batch: Structures) -> NDArray[np.float64]:
    values = energies_of(output, batch)
    for b in np.flatnonzero(~np.isfinite(values))[:1]:
        raise ValueError(f"the model gives {values[b]} eV for structure {batch.sid[b]} ({name})")
    return values


def prepared(model: Any, batch: Structures) -> Structures:
    """The batch on the device of a module, with what its `prepare_batch` attaches, if any."""
    if callable(prepare := getattr(model, "prepare_batch", None)):
        batch = prepare(batch)
    tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
    return batch.to(tensors[0].device if tensors else "cpu")


def batches(structures: Iterable[Structures], batch_size: int) -> Iterator[Structures]:
    """The systems of `structures` in batches of at least `batch_size`; the last one may be smaller.

    Raises:
        ValueError: a `batch_size` that is not a whole number from 1 on.
    """
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number ≥ 1, got {batch_size!r}")
    parts: list[Structures] = []
    for structure in structures:
        parts.append(structure)
        if sum(len(part) for part in parts) >= batch_size:
            yield Structures.cat(parts)
            parts = []
    if parts:
        yield Structures.cat(parts)


def energy_array(values: Any, name: str = "energies") -> NDArray[np.float64]:
    """`values` as a (B,) float64 array, eV.

    Args:
        values: tensor, array or sequence of numbers, of shape (B,), (B, 1) or (), one system.
        name: what the values are, for the error.

    Raises:
        ValueError: values that are not real numbers, or another shape: against (B,), (1, B) would
            broadcast to (B, B).
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    array = np.asarray(values)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be real numbers in eV, got {array.dtype} values")
    if array.ndim > 2 or (array.ndim == 2 and array.shape[1] != 1):
        raise ValueError(f"{name} have shape {array.shape}, expected (B,) or (B, 1)")
    return array.astype(np.float64).reshape(-1)


def energies_of(output: Any, batch: Structures) -> NDArray[np.float64]:
    """Energies (B,) float64, eV, out of a model's output for a batch.

    Raises:
        ValueError: not one energy per system.
    """
    found = output["energy"] if isinstance(output, Mapping) else output
    values = energy_array(found, "predictions")
    if len(values) != len(batch):
        raise ValueError(f"the model gave {len(values)} energies for {len(batch)} systems")
    return values


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """`model` in eval mode; afterwards each of its submodules has its own flag again."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    training = [module for module in modules if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_elements(model: Any, elements: Iterable[int]) -> list[str]:
    """Symbols of the `elements` (atomic numbers) that `model` was never trained on, by number.

    Without a buffer `elements_seen` (119,) bool of the model nothing is known: none.
    """
    from ase.data import chemical_symbols

    seen = getattr(model, "elements_seen", None)
    return [chemical_symbols[z] for z in sorted(set(elements)) if seen is not None and not seen[z]]


def unfit_for(
    models: Sequence[Any], batch: Structures, members: Members | None = None
) -> dict[str, Tensor]:
    """Text of a warning → (B,) bool, the systems that the models were not made for."""
    batch = batch.to("cpu")
    found: dict[str, Tensor] = {}
    if any(getattr(getattr(x, "config", None), "feedback", None) == "positions" for x in models):
        free = ~with_atom(batch, batch.fixed) & with_atom(batch, batch.tags == 0)
        found[_FREE] = free & with_atom(batch, batch.tags != 0)
    if not all(getattr(x, "sees_images", True) for x in models):
        periodic = batch.cell.double() * batch.pbc[..., None]
        heights = 1 / torch.linalg.vector_norm(torch.linalg.pinv(periodic), dim=-2)  # inf if open
        found[_NARROW] = heights.amin(dim=1) < 4  # the narrowest shipped slabs are wider
    for model in models:
        if largest := (getattr(model, "trained_on", None) or {}).get("most_atoms"):
            found[_LARGE] = found.get(_LARGE, False) | (batch.natoms > 2 * largest)
    stored = batch.info.get("tag_rule", ())
    for own in map(str, members.rules if members and stored else ()):
        text = f"tagged by another rule than the model's training data, '{own}', in "
        text += "{which}: energies may be far off"
        found[text] = torch.tensor([x not in (None, own) for x in stored])
    return found


_FREE = (
    "no atom is fixed in {which}, so this model moves the slab's lower layers too: fix them with "
    "FixAtoms or tag_slab(atoms, fix=True)"
)
_NARROW = "cells narrower than 4 Å in {which}: this model sees no periodic images; repeat the cells"
_LARGE = (
    "more than twice as many atoms as the largest training system in {which}: errors grow with "
    "size there"
)
UNSEEN = "elements never trained on: {which}: energies of structures with them are extrapolated"
"""A warning, of symbols of elements."""
