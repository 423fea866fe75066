"""Images and labels: Fashion-MNIST's files, scikit-learn's digits, or drawn stripes."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Images(NamedTuple):
    """Pixels (n, S, S), of mean 0 and variance 1 over the training images, and classes (n,)."""

    pixels: Tensor
    classes: Tensor


def read_idx(path: Path) -> Tensor:
    """An idx file of unsigned bytes, compressed by gzip or not.

    Raises:
        ValueError: another kind of file, or another length than its head says.
    """
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix == ".gz" else data
    rank = data[3] if data[:3] == b"\0\0\x08" and len(data) > 3 else 0
    start = 4 + 4 * rank
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4)]
    if not rank or len(data) != start + math.prod(shape):
        raise ValueError(f"{path} is not an idx file of bytes, or not of the length in its head")
    return torch.frombuffer(bytearray(data[start:]), dtype=torch.uint8).view(shape)


def fashion_mnist(folder: Path) -> tuple[Images, Images]:
    """60,000 images for training and 10,000 for test, from the four idx files of `folder`.

    Raises:
        FileNotFoundError: one of the four is missing.
    """

    def read(name: str) -> Tensor:
        path = folder / name
        return read_idx(path if path.exists() else folder / f"{name}.gz")

    train, test = (
        Images(read(f"{part}-images-idx3-ubyte"), read(f"{part}-labels-idx1-ubyte").long())
        for part in ("train", "t10k")
    )
    return _normalised(train, test)


def digits() -> tuple[Images, Images]:
    """scikit-learn's 1,797 digits of 8 × 8 pixels, the last 450 for test.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        message = "no images: give --data FOLDER with Fashion-MNIST's files, or install "
        raise ModuleNotFoundError(message + "scikit-learn for its digits") from error
    found = load_digits()
    pixels, classes = torch.from_numpy(found.images), torch.from_numpy(found.target).long()
    return _normalised(Images(pixels[:-450], classes[:-450]), Images(pixels[-450:], classes[-450:]))


def stripes(count: int = 256, size: int = 8) -> tuple[Images, Images]:
    """Rows (class 0) or columns (1) of a period of four pixels at any place, in noise."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(2, (2 * count,), generator=generator)
    start = torch.rand(2 * count, 1, generator=generator)
    wave = (2 * torch.pi * (torch.arange(size) / 4 + start)).cos()[:, None, :].expand(-1, size, -1)
    noise = torch.randn(2 * count, size, size, generator=generator)
    pixels = torch.where(classes[:, None, None] == 0, wave.mT, wave) + 0.3 * noise
    return Images(pixels[:count], classes[:count]), Images(pixels[count:], classes[count:])


def _normalised(train: Images, test: Images) -> tuple[Images, Images]:
    mean, deviation = train.pixels.float().mean(), train.pixels.float().std()
    train, test = (Images((x.pixels.float() - mean) / deviation, x.classes) for x in (train, test))
    return train, test
