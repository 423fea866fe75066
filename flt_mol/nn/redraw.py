"""Random draws: one that is saved and stays, and others that training goes through on request."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.functional.numerics import outside, placed, seeded_generator

_COUNTERS = ("redraw_seed", "draw_count", "step_count")


class Redrawn(nn.Module):
    """A module with random buffers: what eval uses, and what is saved.

    **The buffers** change when `redraw` is called or a checkpoint is loaded, and never else. So
    eval before and after training differ by what was learned alone.

    **With** ``redraw_every=n`` training uses the buffers in its steps 0 … n − 1, and in steps
    n i … n (i + 1) − 1 draw i, i = 1, 2, …, which follows from two saved numbers: a seed and the
    count of steps. It is no buffer: it is made where it is needed, again after loading, copying
    or a change of dtype or device. A new process goes on with the same draws, and replicas that
    started equal and make the same steps stay equal without talking to each other. An explicit
    `redraw` does not change draws i ≥ 1.

    **A step** begins with the first training forward, and then with the first one after gradients
    have come back to the module. All forwards between two backward passes are one step and share
    one draw: layers or recycles that share the module, several losses or batches in one backward,
    forwards under `torch.no_grad`. With gradient accumulation each forward and backward round is a
    step, whenever the optimiser steps. A forward whose backward never runs (a skipped batch, an
    exception) does not end its step, nor does a backward with ``create_graph=True``, as for forces
    in a loss, since the graph it makes is still to be used. A module in a part of the network that
    gradients never reach stays in step 0.

    The recomputation of activation checkpointing, reentrant or not, uses the present draw and
    counts as nothing, so its gradients are those without checkpointing: as long as the backward
    of a checkpointed forward runs before the first forward of another step, and no explicit
    `redraw` is made in between. Later is an error, where it is noticed: with
    ``use_reentrant=False``. A graph that is not checkpointed holds the draws it was made with.

    In eval and under `torch.inference_mode` nothing is counted. With ``redraw_every=None`` nothing
    ever is, and there are no hooks and no counters. `torch.compile` breaks the graph where steps
    are counted, and transforms of `torch.func` refuse to count: ``fullgraph=True`` and they need
    ``redraw_every=None`` (or eval), and calls of `redraw` between steps where they are wanted.

    Subclasses define `_draw` and call `_init_redraw` once that is possible. Their forward begins
    with `_count_step`, reads draws by `_drawn` and gives its results to `_watch`.

    Attributes:
        redraw_every: n, or None.
        redraw_seed, draw_count, step_count: int64 buffers (), only with ``redraw_every=n``: what
            later draws follow from, how many explicit ones there were, and how many steps have
            begun. A checkpoint without them loads, and they stay as they are; a checkpoint with
            them loads where they do not exist.

    Example:
        >>> class Noise(Redrawn):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self._init_redraw(1, torch.Generator().manual_seed(0))
        ...
        ...     def _draw(self, generator):
        ...         return {"noise": torch.randn((), generator=generator)}
        ...
        ...     def forward(self, x):
        ...         self._count_step()
        ...         out = x * self._drawn("noise")
        ...         self._watch(out)
        ...         return out
        >>> module, x = Noise(), torch.ones((), requires_grad=True)
        >>> first, second = module(x), module(x)
        >>> (first + second).backward()
        >>> third = module(x)
        >>> bool(first == second), bool(second == third), bool(first == module.eval()(x))
        (True, False, True)
    """

    redraw_every: int | None = None
    redraw_seed: Tensor
    draw_count: Tensor
    step_count: Tensor

    # The number of steps begun, None until it is read, and whether the last of them goes on.
    _steps: int | None = None
    _in_step: bool = False
    # i, and draw i.
    _renewed: tuple[int, dict[str, Tensor]] | None = None
    # The latest backward pass that recomputed a forward; and one, with the step, that reached a
    # graph of another step than the present one.
    _recomputed_in: int = -1
    _other_step: tuple[int, int] = (0, -2)

    def _init_redraw(self, redraw_every: int | None, generator: torch.Generator | None) -> None:
        """Make the buffers and, where other draws follow, the numbers that decide them.

        Args:
            redraw_every: n ≥ 1, or None.
            generator: on CPU, of the buffers and of the seed; None takes a seed from torch's
                global one.

        Raises:
            ValueError: `redraw_every` that is no whole number, or below 1.
        """
        redraw_every = _checked(redraw_every)
        generator = seeded_generator(generator)
        for name, value in self._draw(generator).items():
            self.register_buffer(name, placed(value))
        self.redraw_every = redraw_every
        if redraw_every is not None:
            _prepare_graphs()
            seed = torch.randint(2**62, (), generator=generator, dtype=torch.int64, device="cpu")
            for name, value in zip(_COUNTERS, (seed, 0 * seed, 0 * seed), strict=True):
                self.register_buffer(name, value.to(torch.get_default_device()))

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """All random buffers by their names, new from `generator`."""
        raise NotImplementedError(f"{type(self).__name__} draws nothing: define _draw")

    def _seeded(self, number: int) -> torch.Generator:
        """The generator of the draw of this number: odd ones are explicit, even ones training's."""
        return torch.Generator("cpu").manual_seed((int(self.redraw_seed) + number) % 2**63)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw the buffers anew, in any mode: new tensors, graphs made before keep the old ones.

        Args:
            generator: on CPU. Without one the draw follows from the saved seed and the number of
                explicit draws or, with ``redraw_every=None``, from torch's global generator.
        """
        with torch.inference_mode(False), torch.no_grad():
            if generator is None and self.redraw_every is not None:
                self.draw_count.add_(1)
                generator = self._seeded(2 * int(self.draw_count) + 1)
            for name, value in self._draw(seeded_generator(generator)).items():
                setattr(self, name, value.to(getattr(self, name)))

    def _count_step(self) -> None:
        """Begin a step if this is a training forward and none is going on."""
        if self.redraw_every is not None and self.training:
            outside(_count)(self)

    def _drawn(self, name: str) -> Tensor:
        """What buffer `name` stands for now: itself, or the draw that training is at."""
        value: Tensor
        if self.redraw_every is None or not self.training:
            value = getattr(self, name)
        else:
            value = outside(_present)(self, name, self.redraw_every)
        return value

    def _watch(self, *results: Tensor, always: bool = False) -> None:
        """End the step once gradients come back to one of these.

        Where none of them requires gradients they never do. With `always` the last one then does,
        so that what is made of it is noticed.
        """
        if self.redraw_every is not None and self.training:
            outside(_hook)(self, results, always)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: not the draw that follows from the rest."""
        return {**self.__dict__, "_renewed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What is unpickled may be compiled before anything else."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.redraw_every is not None:
            _prepare_graphs()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **settings: Any
    ) -> None:
        if prefix + "forward_count" in state_dict:  # its name when every forward was a step
            state_dict[prefix + "step_count"] = state_dict.pop(prefix + "forward_count")
        for name in _COUNTERS:
            own = self._buffers.get(name)
            if own is None:
                state_dict.pop(prefix + name, None)
            else:
                state_dict.setdefault(prefix + name, own)
        super()._load_from_state_dict(state_dict, prefix, *args, **settings)
        self._steps, self._in_step, self._renewed = None, False, None


def _prepare_graphs() -> None:
    """Have them ready before a graph is built: a graph cannot make them."""
    for function in (_count, _present, _hook):
        outside(function)


def _checked(redraw_every: int | None) -> int | None:
    if redraw_every is None:
        return None
    try:
        whole = operator.index(redraw_every)
    except TypeError:
        whole = 0
    if whole < 1:
        raise ValueError(
            f"redraw_every is {redraw_every}: give the number of training steps with one draw, "
            "1 or more, or None for a draw that stays"
        )
    return whole


def _count(module: Redrawn) -> None:
    task = torch._C._current_graph_task_id()
    if task != -1:  # autograd is running: this forward is a recomputation
        module._recomputed_in = task
        _refuse_other_draw(module)
    elif not (module._in_step or torch.is_inference_mode_enabled()):
        module._in_step = True
        module.step_count.add_(1)
        module._steps = None


def _steps(module: Redrawn) -> int:
    """How many steps have begun, read from the buffer once a step."""
    if module._steps is None:
        module._steps = int(module.step_count)
    return module._steps


def _present(module: Redrawn, name: str, redraw_every: int) -> Tensor:
    saved: Tensor = getattr(module, name)
    index = max(_steps(module) - 1, 0) // redraw_every
    if index == 0:
        return saved
    number, draws = module._renewed or (0, {})
    value = draws.get(name)
    if (
        value is None
        or number != index
        or (value.dtype, value.device) != (saved.dtype, saved.device)
    ):
        with torch.inference_mode(False), torch.no_grad():
            fresh = module._draw(module._seeded(2 * index))
            draws = {key: new.to(getattr(module, key)) for key, new in fresh.items()}
        module._renewed = index, draws
    return draws[name]


def _hook(module: Redrawn, results: tuple[Tensor, ...], always: bool) -> None:
    if always and torch.is_grad_enabled() and not any(x.requires_grad for x in results):
        results[-1].requires_grad_()
    for result in results:
        if result.requires_grad:
            result.register_hook(partial(_arrived, module, _steps(module)))


def _arrived(module: Redrawn, steps: int, gradient: Tensor) -> None:
    """Gradients have come back to a result of that step."""
    if steps != _steps(module):
        module._other_step = steps, torch._C._current_graph_task_id()
        _refuse_other_draw(module)
    elif not torch.is_grad_enabled():  # it is where create_graph is set
        module._in_step = False


def _refuse_other_draw(module: Redrawn) -> None:
    """Refuse to recompute in one step what was computed in another, with another draw."""
    steps, task = module._other_step
    every = module.redraw_every or 1
    if task == module._recomputed_in and (steps - 1) // every != (_steps(module) - 1) // every:
        raise RuntimeError(
            f"a checkpointed forward of training step {steps - 1} is recomputed in step "
            f"{_steps(module) - 1}, which has another draw: run its backward before the next "
            "step's first forward, or do without checkpointing, or with redraw_every=None"
        )
