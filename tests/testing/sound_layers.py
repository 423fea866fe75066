"""Layers that keep every promise, written out plainly, and a way to break one promise."""

import itertools

import torch
from torch import nn

from helpers.invariances import PackedLayer, random_rows

WIDTH = 4


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(sizes=(5, 0, 7, 1), **settings):
    return random_rows(seeded(1), sizes, WIDTH, **settings)


def per_system(function, rows, *values):
    """`function` of each system's part of `values`, (N, C')."""
    bounds = itertools.pairwise(rows.ptr.tolist())
    return torch.cat([function(*(v[a:b] for v in values)) for a, b in bounds])


class Attention(nn.Module):
    """Softmax of q·k − s r², r the distance: all promises but those of lattices."""

    def __init__(self, seed=0, causal=False):
        super().__init__()
        generator = seeded(seed)
        weights = torch.randn(4, WIDTH, WIDTH, generator=generator, dtype=torch.float32) / 2
        self.weights = nn.Parameter(weights)
        self.slope = nn.Parameter(torch.tensor(0.1, dtype=torch.float32))
        self.register_buffer("draw", torch.rand((), generator=generator, dtype=torch.float32))
        self.causal = causal
        self.dropout = nn.Dropout(0.5)

    def forward(self, rows):
        q, k, v, out = self.weights

        def attend(x, r):
            distances = (r[:, None] - r).square().sum(-1)
            logits = (x @ q) @ (x @ k).T - self.slope * self.draw * distances.to(x.dtype)
            if self.causal:
                later = torch.ones_like(logits).triu(1).bool()
                logits = logits.masked_fill(later, -torch.inf)
            return logits.softmax(-1) @ (x @ v) @ out

        positions = rows.x[:, :0] if rows.positions is None else rows.positions
        return self.dropout(per_system(attend, rows, rows.x, positions))


class Periodic(nn.Module):
    """Σ over rows and images nearer than 3 Å of (1 − r²/9)³ x_j: all promises of lattices."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH, dtype=torch.float32))

    def forward(self, rows):
        return torch.cat([self.of_one(part) for part in rows]) @ self.weight

    def of_one(self, rows):
        cell = rows.cell[0].to(rows.positions)
        cell = cell if bool(cell.any()) else torch.eye(3).to(cell)
        inverse = torch.linalg.inv(cell.double()).to(cell)
        counts = (3 * inverse.norm(dim=0)).ceil() + 1
        counts = [int(n) if p else 0 for n, p in zip(counts, rows.pbc[0], strict=True)]
        ranges = [torch.arange(-n, n + 1) for n in counts]
        images = torch.cartesian_prod(*ranges).to(cell)
        difference = (rows.positions[:, None] - rows.positions) @ inverse
        difference = difference - torch.where(rows.pbc[0], difference.detach().round(), 0)
        vectors = (difference[:, :, None] - images) @ cell
        kernel = (1 - vectors.square().sum(-1) / 9).clamp(min=0) ** 3
        return kernel.sum(-1).to(rows.x.dtype) @ rows.x


class Padded(nn.Module):
    """Softmax attention over (B, L, C) with a mask, as it should be done."""

    def __init__(self):
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH, generator=seeded(3), dtype=torch.float32)
        self.weight = nn.Parameter(weight / 2)

    def forward(self, x, positions, *, mask):
        x = torch.where(mask[..., None], x, 0)
        logits = self.logits(x, positions, mask)
        return torch.where(mask[..., None], logits.softmax(-1) @ x @ self.weight, 0)

    def logits(self, x, positions, mask):
        logits = x @ self.weight @ x.transpose(1, 2)
        if positions is not None:
            r = torch.where(mask[..., None], positions, 0)
            logits = logits - 0.1 * (r[:, :, None] - r[:, None]).square().sum(-1)
        return logits.masked_fill(~mask[:, None], -1e30)


class Broken(nn.Module):
    """A sound layer but for what `fault(rows, outputs)` makes of its outputs."""

    def __init__(self, fault, layer=None):
        super().__init__()
        self.layer = Attention() if layer is None else layer
        self.fault = fault

    def forward(self, rows):
        return self.fault(rows, self.layer(rows))


def packed(function):
    """`function(rows)` as a layer."""
    return PackedLayer(function, lambda f, rows: f(rows))
