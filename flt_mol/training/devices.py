"""Devices by name, refused where this machine has none such."""

from __future__ import annotations

import torch


def find_device(name: str | torch.device) -> torch.device:
    """The device of that name, ready to use.

    Raises:
        ValueError: no such device, or none here, with the mend.

    Example:
        >>> find_device("cpu")
        device(type='cpu')
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"no device is called '{name}'; try cpu, cuda, cuda:1 or mps") from error
    count = _count(device.type)
    if count == 0:
        raise ValueError(
            f"device '{name}': torch {torch.__version__} finds no {device.type} device here; "
            "use cpu, or install a build of torch for your accelerator"
        )
    if device.index is not None and device.index >= count:
        raise ValueError(f"device '{name}': there are {count} here, counted from 0")
    return device


def _count(kind: str) -> int:
    if kind == "cpu":
        return 1
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    if kind == "cuda":
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != kind or not torch.accelerator.is_available():
        return 0
    return torch.accelerator.device_count()
