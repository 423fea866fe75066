"""Training and eval mode of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """`model` in eval mode; afterwards each of its submodules has its own flag back."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    flags = [module.training for module in modules]
    try:
        if isinstance(model, nn.Module):
            model.eval()
        yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag
