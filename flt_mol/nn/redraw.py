"""When random draws are renewed: never, or every so many training forwards, always the same way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.functional._common import placed, seeded_generator

_COUNTERS = ("redraw_seed", "draw_count", "forward_count")


class Redrawn(nn.Module):
    """A module with random buffers that can be drawn anew.

    With ``redraw_every=None`` the first draw stays for good, and there is nothing here but
    `redraw`. With ``redraw_every=n`` the training forwards n, 2n, … (counted from 0) begin with a
    new draw. The i-th of them follows from two saved numbers, a seed and i. So a checkpoint that is
    loaded in another process goes on with the same draws, and replicas that started equal and
    make the same number of forwards stay equal without talking to each other.

    A training forward is one in training mode that autograd did not ask for: the second forward of
    activation checkpointing must repeat the first, so it counts as none. Forwards under
    `torch.no_grad` count, because reentrant checkpointing makes its first ones there. In eval and
    under `torch.inference_mode` nothing is drawn and nothing counted.

    A new draw is a new tensor. The graph of an earlier forward keeps the old one, and its backward
    pass stays valid.

    `torch.compile` breaks the graph where forwards are counted, hence ``fullgraph=True`` needs
    ``redraw_every=None``, and calls of `redraw` between forwards where they are wanted.

    Subclasses define `_draw`, call `_init_redraw` once that is possible, and `_maybe_redraw` at
    the start of a forward.

    Attributes:
        redraw_every: n, or None.
        redraw_seed, draw_count, forward_count: int64 buffers (), only with ``redraw_every=n``: what
            the draws follow from, how many there were after the first, and how many training
            forwards. A checkpoint without them loads, and they stay as they are; a checkpoint
            with them loads where they do not exist.

    Example:
        >>> class Noise(Redrawn):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self._init_redraw(2, torch.Generator().manual_seed(0))
        ...
        ...     def _draw(self, generator):
        ...         self._set_drawn("noise", torch.randn((), generator=generator))
        ...
        ...     def forward(self):
        ...         self._maybe_redraw()
        ...         return self.noise
        >>> module = Noise()
        >>> first, second, third = module(), module(), module()
        >>> first is second, second is third
        (True, False)
    """

    redraw_every: int | None = None
    redraw_seed: Tensor
    draw_count: Tensor
    forward_count: Tensor

    def _init_redraw(self, redraw_every: int | None, generator: torch.Generator | None) -> None:
        """Make the first draw and, where more follow, the buffers that decide them.

        Args:
            redraw_every: n ≥ 1, or None.
            generator: on CPU, of the first draw and of the seed; None takes a seed from torch's
                global one.

        Raises:
            ValueError: `redraw_every` below 1.
        """
        if redraw_every is not None and redraw_every < 1:
            raise ValueError(
                f"redraw_every is {redraw_every}: give the number of training forwards between "
                "two draws, 1 or more, or None for a draw that stays"
            )
        generator = seeded_generator(generator)
        self._draw(generator)
        self.redraw_every = redraw_every
        if redraw_every is not None:
            seed = torch.randint(2**62, (), generator=generator, dtype=torch.int64, device="cpu")
            for name, value in zip(_COUNTERS, (seed, 0 * seed, 0 * seed), strict=True):
                self.register_buffer(name, value.to(torch.get_default_device()))

    def _draw(self, generator: torch.Generator) -> None:
        """Draw all random buffers from `generator`, each stored by `_set_drawn`."""
        raise NotImplementedError(f"{type(self).__name__} draws nothing: define _draw")

    def _set_drawn(self, name: str, value: Tensor) -> None:
        """Store `value` as buffer `name`: a new tensor of the old one's dtype and device."""
        current = self._buffers.get(name)
        if current is None:
            self.register_buffer(name, placed(value))
        else:
            setattr(self, name, value.to(current))

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw anew, in any mode: from `generator` (on CPU) or, without one, the next draw.

        The next draw is that of the saved seed and count, or, with ``redraw_every=None``, one
        whose seed is taken from torch's global generator.
        """
        with torch.inference_mode(False), torch.no_grad():
            if generator is None and self.redraw_every is not None:
                self.draw_count.add_(1)
                seed = (int(self.redraw_seed) + int(self.draw_count)) % 2**63
                generator = torch.Generator("cpu").manual_seed(seed)
            self._draw(seeded_generator(generator))

    def _maybe_redraw(self) -> None:
        """Count a training forward, and draw anew before it if it is its turn."""
        if self.redraw_every is not None and self.training:
            _count_forward(self, self.redraw_every)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **settings: Any
    ) -> None:
        for name in _COUNTERS:
            own = self._buffers.get(name)
            if own is None:
                state_dict.pop(prefix + name, None)
            else:
                state_dict.setdefault(prefix + name, own)
        super()._load_from_state_dict(state_dict, prefix, *args, **settings)


def _counted(module: Redrawn, redraw_every: int) -> None:
    # A graph task runs while autograd does: this forward is then a recomputation.
    if torch.is_inference_mode_enabled() or torch._C._current_graph_task_id() != -1:
        return
    forwards = int(module.forward_count)
    if forwards > 0 and forwards % redraw_every == 0:
        module.redraw()
    module.forward_count.add_(1)


_count_forward = torch.compiler.disable(_counted)
