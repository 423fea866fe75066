"""What a layer must do at least: multiplications counted, bytes counted, and the time they take.

Counts are of matrix products, from their three sizes; what goes on between them (norms, GELU,
exponentials, residuals) is left out, as if it were fused into them. The floor of a layer is the
time of its products at the rates this machine reached in the same run: of each product the larger
of flops over the rate of `torch.mm` and bytes over the rate of a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from flt_mol.analysis.layer_cost import LayerSize

__all__ = [
    "Fft",
    "Other",
    "Product",
    "Rates",
    "attention_products",
    "block_products",
    "byte_floor",
    "floors_of",
    "flop_floor",
    "gemm_runner",
    "linear_maps",
    "rate_functions",
    "roofline",
    "softmax_products",
    "with_backward",
]

_NUMBER = 4  # bytes, float32


class Product(NamedTuple):
    """So many `times` a matrix product (rows × inner)·(inner × columns), float32."""

    rows: int
    inner: int
    columns: int
    times: int = 1

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.inner * self.columns * self.times

    @property
    def bytes(self) -> int:
        """Both factors read once, the product written once."""
        m, k, n = self[:3]
        return _NUMBER * (m * k + k * n + m * n) * self.times

    def backward(self) -> tuple[Product, Product]:
        """The products that give the gradients of both factors."""
        m, k, n, times = self
        return Product(m, n, k, times), Product(k, m, n, times)


class Fft(NamedTuple):
    """So many `times` a Fourier transform of `length` real numbers, there or back."""

    length: int
    times: int = 1

    @property
    def flops(self) -> int:
        """2.5 n log₂ n, as usual for a transform of real numbers."""
        return round(2.5 * self.length * math.log2(self.length)) * self.times

    @property
    def bytes(self) -> int:
        """Of n real numbers and n/2 + 1 complex ones, each moved once."""
        return _NUMBER * (self.length + 2 * (self.length // 2 + 1)) * self.times

    def backward(self) -> tuple[Fft]:
        """A transform as well: it is linear."""
        return (self,)


class Other(NamedTuple):
    """Work of another kind, counted by hand; its backward pass is twice as much."""

    flops: int
    bytes: int

    def backward(self) -> tuple[Other]:
        """Gradients of both factors of a product."""
        return (Other(2 * self.flops, 2 * self.bytes),)


Work = Product | Fft | Other


class Rates(NamedTuple):
    """What the machine does, measured in the same run.

    Attributes:
        flops: per second, of a large `torch.mm`.
        bytes: per second, read and written, of a large copy.
    """

    flops: float
    bytes: float

    @classmethod
    def of(cls, sgemm_seconds: float, copy_seconds: float, size: int, numbers: int) -> Rates:
        """From the seconds of what `rate_functions` gives."""
        return cls(Product(size, size, size).flops / sgemm_seconds,
                   2 * _NUMBER * numbers / copy_seconds)  # fmt: skip


def linear_maps(size: LayerSize, part: str = "block") -> list[Work]:
    """The linear maps of a layer: queries, keys and values, output, and the feed-forward net."""
    n, c, f = size.tokens, size.embed_dim, size.ffn_dim
    maps: list[Work] = [Product(n, c, 3 * c), Product(n, c, c)]
    return [*maps, Product(n, c, f), Product(n, f, c)] if part == "block" else maps


def attention_products(size: LayerSize, positions: bool) -> list[Work]:
    """Linear attention after its maps: features of queries and keys, sums over keys, read-out.

    The normaliser is one more column of the values. Positions add a product with the R cosines
    and R sines, for queries and for keys.
    """
    n, h, m = size.tokens, size.num_heads, size.num_features
    d = size.embed_dim // h
    inner = d + 2 * size.num_frequencies if positions else d
    features = Product(n, inner, m, 2 * h)
    return [features, Product(m, n, d + 1, h), Product(n, m, d + 1, h)]


def softmax_products(size: LayerSize) -> list[Work]:
    """Exact attention after its maps; its logits are written out, as a bias asks for."""
    n, h = size.tokens, size.num_heads
    d = size.embed_dim // h
    return [Product(n, d, n, h), Product(n, n, d, h)]


def fft_products(size: LayerSize) -> list[Work]:
    """Linear attention with a Toeplitz mask: two transforms for each entry of φ(k) vᵀ."""
    n, h, m = size.tokens, size.num_heads, size.num_features
    d = size.embed_dim // h
    features, _, read_out = attention_products(size, positions=False)
    assert isinstance(read_out, Product)
    # Read out with sums of its own for every row: a matrix-vector product for each.
    rows = Product(1, m, d + 1, n * h)
    return [features, Fft(2 * n, 2 * h * m * (d + 1)), rows]


def block_products(size: LayerSize, kind: str) -> list[Work]:
    """All of a block: `kind` is "linear", "positions", "softmax" or "fft".

    Raises:
        ValueError: another kind.
    """
    cores: dict[str, Callable[[], list[Work]]] = {
        "linear": lambda: attention_products(size, False),
        "positions": lambda: attention_products(size, True),
        "softmax": lambda: softmax_products(size),
        "fft": lambda: fft_products(size),
    }
    if kind not in cores:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(cores)}")
    return linear_maps(size) + cores[kind]()


def with_backward(work: Iterable[Work]) -> list[Work]:
    """These products, and those of their backward pass."""
    return [each for one in work for each in (one, *one.backward())]


def flop_floor(work: Iterable[Work], rates: Rates) -> float:
    """Seconds for the multiplications alone."""
    return sum(one.flops for one in work) / rates.flops


def byte_floor(work: Iterable[Work], rates: Rates) -> float:
    """Seconds for the bytes alone."""
    return sum(one.bytes for one in work) / rates.bytes


def roofline(work: Iterable[Work], rates: Rates) -> float:
    """Seconds, of each product the larger of both floors."""
    return sum(max(one.flops / rates.flops, one.bytes / rates.bytes) for one in work)


def floors_of(work: Iterable[Work], rates: Rates) -> dict[str, float]:
    """``flops``, counted, and seconds of three floors: ``gemm``, ``bytes`` and ``roofline``."""
    work = list(work)
    products = [one for one in work if isinstance(one, Product)]
    return {
        "flops": sum(one.flops for one in work),
        "gemm": flop_floor(products, rates),
        "bytes": byte_floor(work, rates),
        "roofline": roofline(work, rates),
    }


def gemm_runner(work: Iterable[Work]) -> Callable[[], None]:
    """A function that does these products, each into a result that is there already."""
    products = [one for one in work if isinstance(one, Product)]
    operands = [(torch.randn(p.rows, p.inner, dtype=torch.float32),
                 torch.randn(p.columns, p.inner, dtype=torch.float32).T,
                 torch.empty(p.rows, p.columns, dtype=torch.float32), p.times)
                for p in products]  # fmt: skip

    def run() -> None:
        for left, right, out, times in operands:
            for _ in range(times):
                torch.mm(left, right, out=out)

    return run


def rate_functions(size: int = 2048, numbers: int = 2**25) -> dict[str, Callable[[], Any]]:
    """Functions whose seconds give `Rates`: a product of squares, and a copy."""
    square, source = torch.randn(size, size), torch.randn(numbers)
    product, target = torch.empty_like(square), torch.empty_like(source)
    return {
        "sgemm": lambda: torch.mm(square, square, out=product),
        "copy": lambda: target.copy_(source),
    }
