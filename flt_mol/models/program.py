"""An energy model as a graph of tensors, for `torch.export` and what reads its programs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as symbolic_shapes

from flt_mol.models.energy import EnergyModel


class TensorModel(nn.Module):
    """An `EnergyModel` that takes the tensors of `Structures` it needs, and gives a tensor.

    Args:
        model: the model, whose weights are shared.
    """

    def __init__(self, model: EnergyModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, atomic_numbers: Tensor, positions: Tensor, tags: Tensor, ptr: Tensor
    ) -> Tensor:
        """Energies (B,) in eV; the arguments are the fields of `Structures`."""
        if not torch.compiler.is_compiling():
            return self.model.energies(atomic_numbers, positions, tags, ptr)
        # A row of padding at the end: a graph for N rows holds for one atom, too, if N + 1 ≥ 2.
        rows = (atomic_numbers, atomic_numbers.new_ones(1)), (tags, tags.new_zeros(1))
        places = torch.cat([positions, positions.new_zeros(1, 3)])
        return self.model.energies(torch.cat(rows[0]), places, torch.cat(rows[1]), ptr)


def export_program(model: EnergyModel) -> ExportedProgram:
    """The model in eval mode as a `torch.export` program for any number of atoms and systems ≥ 1.

    It takes ``(atomic_numbers, positions, tags, ptr)``, the fields of `Structures`, and gives
    energies (B,) in eV. It holds the weights and the graph, no Python of this library but its
    operators: ``import flt_mol.functional`` before loading a saved program.

    Args:
        model: on any device; its mode is left as it is.

    Example:
        >>> from flt_mol import Structures
        >>> from flt_mol.models import EnergyConfig
        >>> program = export_program(EnergyModel(EnergyConfig(embed_dim=16, num_layers=1)))
        >>> water = Structures.single([8, 1, 1], [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
        >>> program.module()(water.atomic_numbers, water.positions, water.tags, water.ptr).shape
        torch.Size([1])
    """
    # Three systems of seven atoms: sizes of 0 and 1 would be taken for constants here.
    device = next(model.parameters()).device
    atomic_numbers = torch.ones(7, dtype=torch.int64, device=device)
    positions = torch.zeros(7, 3, dtype=torch.float32, device=device)
    ptr = torch.tensor([0, 2, 5, 7], device=device)
    atoms, offsets = {0: Dim("atoms", min=1)}, {0: Dim("offsets", min=2)}
    mode = model.training
    try:
        # Without this a graph is for two systems or more, since one is a special case of layouts.
        with symbolic_shapes.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            return torch.export.export(
                TensorModel(model).eval(),
                (atomic_numbers, positions, torch.zeros_like(atomic_numbers), ptr),
                dynamic_shapes=(atoms, atoms, atoms, offsets),
            )
    finally:
        model.train(mode)
