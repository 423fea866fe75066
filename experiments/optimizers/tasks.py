"""What optimisers are trained and tested on: small nets, and functions with many minima.

K problems of one kind are one object; x is (K, …). `start` is where an optimiser begins; `evaluate`
gives values and their gradient by x; `meta_gradient` is that of the loss to train by; `report`
(K,) is what curves show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module, util
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Images:
    """Images (N, side²), of mean 0 and variance 1, and their classes (N,), 0 to 9."""

    pixels: Tensor
    labels: Tensor

    def part(self, test: bool, side: int) -> Images:
        """Every other image, averaged to side × side pixels."""
        pixels = self.pixels[int(test) :: 2]
        full = math.isqrt(pixels.shape[1])
        pixels = F.avg_pool2d(pixels.view(-1, 1, full, full), full // side).flatten(1)
        return Images((pixels - pixels.mean()) / pixels.std(), self.labels[int(test) :: 2])


def has_digits() -> bool:
    """Whether scikit-learn is installed, which brings the digits."""
    return util.find_spec("sklearn") is not None


def load_images(name: str) -> Images:
    """The digits of scikit-learn, 1,797 images of 8 × 8; or "synthetic" ones of that shape.

    Raises:
        ImportError: digits without scikit-learn.
    """
    if name == "digits":
        if not has_digits():
            raise ImportError("the digits come with scikit-learn: install it, or --data synthetic")
        found = import_module("sklearn.datasets").load_digits()
        return Images(torch.tensor(found.data).float(), torch.tensor(found.target))
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (1800,), generator=generator)
    # Two smooth patterns for a class, and noise.
    centres = torch.randn(20, 1, 4, 4, generator=generator)
    centres = F.interpolate(centres, size=8, mode="bilinear").flatten(1)
    kind = labels + 10 * torch.randint(2, (1800,), generator=generator)
    return Images(centres[kind] + 0.8 * torch.randn(1800, 64, generator=generator), labels)


class Nets:
    """K small nets of one shape, each with its own weights and minibatches; x is (K, P).

    Args:
        images: what they classify.
        hidden, activation: widths of hidden layers; "tanh" or "relu".
        count: K.
        generator: for weights and minibatches of `batch` images.
    """

    def __init__(
        self,
        images: Images,
        hidden: tuple[int, ...],
        activation: str,
        count: int,
        generator: torch.Generator,
        batch: int = 32,
    ) -> None:
        sizes = (images.pixels.shape[1], *hidden, 10)
        self.shapes = [(a + 1, b) for a, b in pairwise(sizes)]
        self.activation = {"tanh": torch.tanh, "relu": torch.relu}[activation]
        self.images, self.count, self.batch, self.generator = images, count, batch, generator

    def start(self) -> Tensor:
        """Normal weights of variance 1/inputs, biases 0."""
        parts = []
        for inputs, outputs in self.shapes:
            weight = torch.randn(self.count, inputs, outputs, generator=self.generator)
            weight[:, -1] = 0.0
            parts.append(weight.flatten(1) * (inputs - 1) ** -0.5)
        return torch.cat(parts, 1)

    def losses(self, x: Tensor, rows: Tensor) -> Tensor:
        """Cross-entropy (K,) of images `rows` (K, n)."""
        h, begin = self.images.pixels[rows], 0
        for layer, (inputs, outputs) in enumerate(self.shapes):
            weight = x[:, begin : begin + inputs * outputs].view(-1, inputs, outputs)
            begin += inputs * outputs
            h = torch.baddbmm(weight[:, -1:], h, weight[:, :-1])
            h = self.activation(h) if layer < len(self.shapes) - 1 else h
        labels = self.images.labels[rows]
        return F.cross_entropy(h.transpose(1, 2), labels, reduction="none").mean(1)

    def evaluate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of a new minibatch, and their gradient."""
        size = (self.count, self.batch)
        rows = torch.randint(len(self.images.labels), size, generator=self.generator)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            losses = self.losses(x, rows)
            (gradient,) = torch.autograd.grad(losses.sum(), x)
        return losses.detach(), gradient

    def meta_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """That of the losses."""
        return gradient

    def report(self, x: Tensor, values: Tensor) -> Tensor:
        """The loss of all images."""
        return self.losses(x, torch.arange(len(self.images.labels)).expand(self.count, -1))


class Rastrigin:
    r"""K functions of d variables with a lattice of minima, for n members each; x is (K, n, d).

    f(x) = (1/d) Σ_k [s_k y_k² + α (1 − cos 2π y_k)], y = Q (x − c), with Q a random rotation, c
    normal and α uniform; s_k = 1, or log-uniform between 1/s and s. f(c) = 0 is the minimum.

    Args:
        dim, count, members: d, K and n.
        amplitude: lowest and highest α.
        stretch: s.
        generator: for functions and members.
    """

    def __init__(
        self,
        dim: int,
        amplitude: tuple[float, float],
        stretch: float,
        count: int,
        generator: torch.Generator,
        members: int = 16,
    ) -> None:
        self.shape, self.generator = (count, members, dim), generator
        low, high = amplitude
        self.amplitude = low + (high - low) * torch.rand(count, 1, 1, generator=generator)
        self.rotation = torch.linalg.qr(torch.randn(count, dim, dim, generator=generator))[0]
        self.centre = torch.randn(count, 1, dim, generator=generator)
        power = 2 * torch.rand(count, 1, dim, generator=generator) - 1
        self.scale = (math.log(stretch) * power).exp()

    def start(self) -> Tensor:
        """Members uniform in [−3, 3]^d."""
        return 6 * torch.rand(self.shape, generator=self.generator) - 3

    def evaluate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values f (K, n), and their gradient in closed form."""
        y = (x.detach() - self.centre) @ self.rotation
        turns = 2 * math.pi * y
        values = self.scale * y.square() + self.amplitude * (1 - turns.cos())
        slope = 2 * self.scale * y + 2 * math.pi * self.amplitude * turns.sin()
        return values.mean(-1), slope @ self.rotation.transpose(1, 2) / y.shape[-1]

    def meta_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """That of f without its waves, (1/d) Σ_k s_k y_k², in the mean over members."""
        y = (x - self.centre) @ self.rotation
        return 2 * self.scale * y @ self.rotation.transpose(1, 2) / (x.shape[1] * x.shape[2])

    def report(self, x: Tensor, values: Tensor) -> Tensor:
        """The best member's value."""
        return values.amin(1)


Problem = Nets | Rastrigin
