"""Random buffers that training resamples on request."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from flt_mol.functional.groups import outside
from flt_mol.nn.layers import placed, seeded_generator


class Redrawn(nn.Module):
    """A module with random buffers, which are saved and used by evaluation.

    The buffers change when `redraw` is called or a checkpoint is loaded, never otherwise. With
    ``redraw_every=n`` training uses the buffers in steps 0 … n − 1, and draw i in steps n i …
    n (i + 1) − 1. Draw i follows from two saved numbers, a seed and the count of steps: a resumed
    run and equal replicas have the same draws. Eval counts nothing.

    A step begins with the first training forward after gradients have come back to the module; all
    forwards between two backward passes share one draw. A backward with ``create_graph=True`` ends
    no step, nor does recomputation under activation checkpointing begin one.

    Subclasses define `_draw` and call `_init_redraw` once that is possible. Where `redraw_every` is
    set, their forward calls `begin_step` first and `watch` last; between the two the buffers, read
    as attributes, are those of the step.

    Attributes:
        redraw_every: n, or None.
        redraw_seed, step_count: int64 buffers (), with ``redraw_every=n`` only.
    """

    redraw_every: int | None = None
    redraw_seed: Tensor
    step_count: Tensor

    _names: tuple[str, ...] = ()
    _in_step: bool = False  # whether step `step_count` is in progress
    # The seed, dtype and device of the draw that the attributes show; None: the buffers.
    _shown: tuple[int | None, torch.dtype, torch.device] | None = None

    def _init_redraw(self, redraw_every: int | None, generator: torch.Generator | None) -> None:
        """Register the buffers, drawn from `generator` (on CPU; None: torch's global one)."""
        if redraw_every is not None and redraw_every < 1:
            raise ValueError(f"redraw_every is {redraw_every}, expected a number ≥ 1, or None")
        generator = seeded_generator(generator)
        for name, value in self._draw(generator).items():
            self.register_buffer(name, placed(value))
            self._names += (name,)
        self.redraw_every = redraw_every
        if redraw_every is not None:
            for function in (_begin, _watch):  # ready before a graph is built
                outside(function)
            seed = torch.randint(2**62, (), generator=generator, dtype=torch.int64, device="cpu")
            for name, value in (("redraw_seed", seed), ("step_count", 0 * seed)):
                self.register_buffer(name, value.to(torch.get_default_device()))

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """All random buffers by their names, new from `generator`."""
        raise NotImplementedError(f"{type(self).__name__} draws nothing: define _draw")

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Resample the buffers, in any mode; autograd graphs made before keep the old ones.

        Args:
            generator: on CPU; None takes a seed from torch.
        """
        with torch.inference_mode(False):
            for name, value in self._draw(seeded_generator(generator)).items():
                self._buffers[name] = value.to(self._saved(name))

    def begin_step(self) -> None:
        """Begin a step if this is a training forward and none is in progress; show its draw."""
        if self.redraw_every is not None and self.training:
            outside(_begin)(self, self.redraw_every)

    def watch(self, *results: Tensor) -> None:
        """End the step once gradients come back to one of these."""
        if self.redraw_every is not None and self.training:
            outside(_watch)(self, results)

    def train(self, mode: bool = True) -> Self:
        """As of any module; the attributes show the buffers again."""
        self._show_saved()
        return super().train(mode)

    def _saved(self, name: str) -> Tensor:
        saved = self._buffers[name]
        assert saved is not None
        return saved

    def _show_saved(self) -> None:
        for name in self._names:
            self.__dict__.pop(name, None)
        self._shown = None


def _begin(module: Redrawn, redraw_every: int) -> None:
    # Where autograd is running, this forward is a recomputation.
    if not module._in_step and torch._C._current_graph_task_id() == -1:
        module._in_step = True
        module.step_count += 1
    index = max(int(module.step_count) - 1, 0) // redraw_every
    seed = (int(module.redraw_seed) + 2 * index) % 2**63 if index else None
    saved = module._saved(module._names[0])
    shown = (seed, saved.dtype, saved.device)
    if module._shown == shown:
        return
    module._show_saved()
    if seed is not None:
        with torch.inference_mode(False):
            draws = module._draw(torch.Generator("cpu").manual_seed(seed))
            # An attribute of the instance hides the buffer, which stays what is saved.
            module.__dict__.update({k: v.to(module._saved(k)) for k, v in draws.items()})
    module._shown = shown


def _watch(module: Redrawn, results: tuple[Tensor, ...]) -> None:
    step = int(module.step_count)

    def arrived(gradient: Tensor) -> None:
        if step == int(module.step_count) and not torch.is_grad_enabled():  # as by create_graph
            module._in_step = False

    for result in results:
        if result.requires_grad:
            result.register_hook(arrived)
