"""What a model reads out of each pass through its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flt_mol.models.normalizer import Normalizer


class Passes:
    """Energies and displacements of all passes, in eV and Å.

    Args:
        outputs: of the model, in the order of the columns of its energy head.
        normalizer: of the relaxed energy.
        normalizer_initial: of the initial energy, where it is an output.

    Attributes:
        features: (N, C), of the last pass.
    """

    features: Tensor

    def __init__(
        self,
        outputs: Sequence[str],
        normalizer: Normalizer,
        normalizer_initial: Normalizer | None,
    ) -> None:
        self._names = [name for name in outputs if name != "displacement"]
        self._normalizers = {"energy": normalizer, "energy_initial": normalizer_initial}
        self._found: dict[str, list[Tensor]] = {}

    def read(self, head: Tensor, step: Tensor | None, feedback: str) -> None:
        """One more pass: what the energy head gives, (B,) or (B, K), and the displacement head.

        With ``feedback="positions"`` displacements are steps from where the atoms were, which add
        up; the loss of a pass is to teach its own step, so those before are held constant.
        """
        columns = [head] if head.dim() == 1 else list(head.unbind(-1))
        for name, column in zip(self._names, columns, strict=True):
            normalizer = self._normalizers[name]
            assert normalizer is not None
            self._found.setdefault(name, []).append(normalizer.denormalize(column))
        if step is None:
            return
        before = self._found.setdefault("displacement", [])
        add = feedback == "positions" and bool(before)
        before.append(step + before[-1].detach() if add else step)

    def moved(self, positions: Tensor) -> Tensor:
        """Positions after the last displacement, held constant for the next pass."""
        step = self._found["displacement"][-1].detach()
        return (positions + step.to(torch.promote_types(positions.dtype, step.dtype))).to(
            positions.dtype
        )

    def outputs(self) -> dict[str, Tensor]:
        """The last pass, and all of them where there are several."""
        out = {name: found[-1] for name, found in self._found.items()}
        for name, found in self._found.items():
            if len(found) > 1:
                out[f"{name}_passes"] = torch.stack(found)
        return out
