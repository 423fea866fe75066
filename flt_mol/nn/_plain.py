"""Whether a module does what its class says, so that its weights may be used without calling it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules import module as torch_module


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether `module` is a `kind` itself, no child of it, and nobody watches its calls.

    Parametrisations (LoRA, weight norm) make another class of a module, so they do not pass.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> is_plain(layer, nn.Linear), is_plain(layer, nn.Module)
        (True, False)
    """
    if type(module) is not kind or torch_module._has_any_global_hook():
        return False
    own = (module._forward_hooks, module._forward_pre_hooks, "forward" in vars(module))
    return not any(own)


def all_plain(module: nn.Module) -> bool:
    """Whether nobody watches the calls of a module's parts, so that they may be called in pieces.

    Example:
        >>> layers = nn.Sequential(nn.Linear(2, 2), nn.GELU())
        >>> all_plain(layers)
        True
        >>> hook = layers[1].register_forward_hook(print)
        >>> all_plain(layers)
        False
    """
    return all(is_plain(part, type(part)) for part in module.modules() if part is not module)


def applied(layer: nn.Module, x: Tensor) -> Tensor:
    """A linear map in the dtype of `x`, whatever that of its weights; hooks of it are called.

    Example:
        >>> import torch
        >>> applied(nn.Linear(2, 3).double(), torch.ones(1, 2)).dtype
        torch.float32
    """
    if isinstance(layer, nn.Linear) and is_plain(layer, nn.Linear):
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return nn.functional.linear(x, layer.weight.to(x.dtype), bias)
    first = next(layer.parameters(), None)
    out: Tensor = layer(x if first is None else x.to(first.dtype))
    return out.to(x.dtype)


def is_stack(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether `module` is a plain Sequential of just these plain layers.

    Example:
        >>> is_stack(nn.Sequential(nn.Linear(2, 2), nn.GELU()), nn.Linear, nn.GELU)
        True
        >>> is_stack(nn.Sequential(nn.Linear(2, 2), nn.GELU()), nn.Linear)
        False
    """
    if not is_plain(module, nn.Sequential):
        return False
    layers = list(module.children())
    return len(layers) == len(kinds) and all(map(is_plain, layers, kinds))
