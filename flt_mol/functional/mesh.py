r"""Sums over the atoms of one large system with a filter of limited band, on a mesh: O(N log N).

The sums of `spectral` by two non-uniform fast Fourier transforms [1]: values are spread over the
nodes of a mesh by Kaiser and Bessel's kernel, transformed, multiplied by the spectrum over
the kernel's squared transform, transformed back and read at the atoms with the same kernel.

Atoms are sorted into bins as wide as the kernel. All of a bin touch one block of nodes, so that
spreading and reading are matrix products.

References:
    [1] Barnett, Magland & af Klinteberg, SIAM J. Sci. Comput. 41, C479 (2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flt_mol.functional.groups import budget_of

_WIDTH = 8  # nodes a kernel covers, and a bin is wide; a block has twice as many
_OVERSAMPLING = 1.5  # nodes per half wave of k_max; both measured, see tests
_BETA = 1.1 * math.pi * _WIDTH * (1 - 1 / (2 * _OVERSAMPLING))
_TOP = float(torch.special.i0e(torch.tensor(_BETA, dtype=torch.float64)))
_NODES = 2**27  # numbers on the meshes of channels that are transformed together
_ATOMS = 2**16  # whose kernels are computed together
_BLOCKS = 2**26  # numbers of the blocks of bins that are spread together, at most


class Mesh(NamedTuple):
    """A mesh of a cell and where atoms lie on it; made once, shared by layers.

    Attributes:
        nodes: n along each lattice vector.
        modes: m along each; modes go from −m to m, in the last direction from 0 to m.
        atoms: (G, L) int64, atoms of each bin that has any; N for padding.
        blocks: (8, G) int64, the bins of the block that begins at each of these.
        weights: (G, L, 3, 2w), kernels at the nodes of the block; 0 for padding.
        place: (N,) int64, each atom's row among the G·L.
    """

    nodes: tuple[int, int, int]
    modes: tuple[int, int, int]
    atoms: Tensor
    blocks: Tensor
    weights: Tensor
    place: Tensor


def mesh_modes(lengths: Sequence[float], k_max: float) -> tuple[int, int, int]:
    """The largest integers m of a cell with vectors of these lengths, Å, m ≤ k_max·length."""
    a, b, c = (int(k_max * length * (1 + 1e-9)) for length in lengths)
    return a, b, c


def mesh_nodes(modes: Sequence[int]) -> tuple[int, int, int]:
    """Nodes n of a mesh that resolves these modes: w times numbers that transforms like."""
    sizes = [(2 * m + 1) * _OVERSAMPLING / _WIDTH for m in modes]
    factors = 1, 3, 5, 7, 9
    a, b, c = (
        _WIDTH * min(f * 2 ** max(0, math.ceil(math.log2(size / f))) for f in factors)
        for size in sizes
    )
    return a, b, c


def mesh_numbers(lengths: Sequence[float], k_max: float, channels: int, functions: int) -> float:
    """About how many numbers spectra of so many functions and sums of channels take on a mesh."""
    modes = math.prod(2.0 * k_max * length + 1 for length in lengths) / 2
    nodes = math.prod((2 * k_max * length + 1) * _OVERSAMPLING + _WIDTH for length in lengths)
    return 6 * functions * modes + 4 * max(nodes, min(channels * nodes, _NODES))


def mode_integers(modes: Sequence[int], device: torch.device | None = None) -> Tensor:
    """(2m + 1, 2m + 1, m + 1, 3) int64, in the order of a transform: 0, 1, …, m, −m, …, −1."""
    a, b, c = (torch.arange(2 * m + 1, device=device) for m in modes)
    a, b = (torch.where(x <= m, x, x - 2 * m - 1) for x, m in zip((a, b), modes, strict=False))
    return torch.stack(torch.meshgrid(a, b, c[: modes[2] + 1], indexing="ij"), -1)


def make_mesh(fraction: Tensor, modes: tuple[int, int, int], dtype: torch.dtype) -> Mesh:
    """Mesh for N ≥ 1 atoms at these fractions (N, 3) of the cell; differentiable.

    Fractions in float64 keep the precision of `dtype`, that of the weights, in large cells too.
    """
    nodes = mesh_nodes(modes)
    size = torch.tensor(nodes, device=fraction.device)
    place = (fraction - fraction.detach().floor()) * size.to(fraction.dtype)
    bins = size // _WIDTH
    corner = (place.detach() / _WIDTH).floor().to(torch.int64).clamp(min=0).minimum(bins - 1)
    owner = (corner[:, 0] * bins[1] + corner[:, 1]) * bins[2] + corner[:, 2]
    order = torch.argsort(owner, stable=True)
    used, count = torch.unique_consecutive(owner[order], return_counts=True)
    first = count.cumsum(0) - count
    steps = torch.arange(int(count.max()), device=fraction.device)
    row = torch.where(steps < count[:, None], first[:, None] + steps, len(fraction))
    atoms = torch.cat([order, order.new_full((1,), len(fraction))])[row]
    rows = torch.empty(len(fraction) + 1, dtype=torch.int64, device=fraction.device)
    rows[atoms.flatten()] = torch.arange(atoms.numel(), device=fraction.device)
    at = torch.stack([used // (bins[1] * bins[2]), used // bins[2] % bins[1], used % bins[2]], -1)
    blocks = []
    for step in product((0, 1), repeat=3):
        x, y, z = ((at + torch.tensor(step, device=at.device)) % bins).unbind(-1)
        blocks.append((x * bins[1] + y) * bins[2] + z)
    local = (place - corner * _WIDTH).to(dtype)
    kernels = torch.cat([_kernel(some) for some in local.split(_ATOMS)])
    padded = torch.cat([kernels, kernels.new_zeros(1, *kernels.shape[1:])])
    return Mesh(nodes, modes, atoms, torch.stack(blocks), padded[atoms], rows[:-1])


def _kernel(place: Tensor) -> Tensor:
    """I₀(β√(1 − x²)) / I₀(β) at the nodes of a block: places in a bin (N, 3) → (N, 3, 2w)."""
    # The kernel's centre is w / 2 behind the atom: reading undoes the shift of spreading.
    x = torch.arange(2 * _WIDTH, device=place.device) - place[..., None]
    inside = 1 - (2 * x / _WIDTH - 1) ** 2
    root = torch.where(inside > 0, inside, 1.0).sqrt()
    # Scaled: the plain function loses a digit in float32.
    scaled = torch.special.i0e(_BETA * root) * (_BETA * (root - 1)).exp()
    return torch.where(inside > 0, scaled / _TOP, 0.0)


def _deconvolution(nodes: int, modes: int, half: bool) -> Tensor:
    """1/φ̂² of the modes along one direction, float64."""
    m = torch.arange(modes + 1, dtype=torch.float64)
    if not half:
        m = torch.cat([m, m[1:].flip(0)])
    root = (_BETA**2 - (math.pi * _WIDTH * m / nodes) ** 2).sqrt()
    return (_TOP * math.exp(_BETA) * root / (_WIDTH * root.sinh())) ** 2


def mesh_filter(value: Tensor, spectrum: Tensor, mesh: Mesh) -> Tensor:
    r"""Σ_j Σ_k γ_kh cos 2πk·(r_i − r_j) v_jh: value (N, H, D), spectrum (H, modes) → (N, H, D).

    γ_kh are those of k and of −k, one each, at `mode_integers`, and 0 from k_max on. All tensors
    of one dtype, float32 or float64. Differentiable any number of times, with recomputation.
    """
    heads, width = value.shape[1:]
    for axis, (n, m) in enumerate(zip(mesh.nodes, mesh.modes, strict=True)):
        factor = _deconvolution(n, m, axis == 2).to(spectrum)
        spectrum = spectrum * factor.view(-1, *[1] * (2 - axis))
    flat = torch.cat([value.flatten(1), value.new_zeros(1, heads * width)])
    step = max(1, _NODES // math.prod(mesh.nodes))
    parts = []
    for first in range(0, heads * width, step):
        head = torch.arange(first, min(first + step, heads * width), device=value.device) // width
        some = flat[:, first : first + step]
        parts.append(checkpoint(_channels, some, spectrum, head, mesh, use_reentrant=False))
    return torch.cat(parts, 1).view(value.shape)


def _channels(value: Tensor, spectrum: Tensor, head: Tensor, mesh: Mesh) -> Tensor:
    waves = _transform(_spread(value, mesh), mesh)
    return _read(_back(waves * spectrum[head], mesh), mesh)


def _octants(mesh: Mesh, channels: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Some bins at a time: these, the bins that are an octant of their blocks, kernels there.

    Kernels are (G, L, w²), products of those in two directions, and (G, L, 1, w) in the third.
    """
    budget = min(2 * budget_of(mesh.atoms.device), _BLOCKS)
    step = max(1, budget // (_WIDTH**3 * channels))
    for first in range(0, len(mesh.atoms), step):
        some = slice(first, first + step)
        halves = [x.split(_WIDTH, 2) for x in mesh.weights[some].unbind(2)]
        for bins, (x, y, z) in zip(mesh.blocks, product(*halves), strict=True):
            yield some, bins[some], (x[..., :, None] * y[..., None, :]).flatten(2), z[:, :, None]


def _spread(value: Tensor, mesh: Mesh) -> Tensor:
    """Values (N + 1, c) on the mesh: (c, n, n, n)."""
    bins, channels, w = [n // _WIDTH for n in mesh.nodes], value.shape[1], _WIDTH
    total = value.new_zeros(math.prod(bins), w * w, channels * w)
    for some, octant, plane, line in _octants(mesh, channels):
        values = (value[mesh.atoms[some]][..., None] * line).flatten(2)
        total.index_add_(0, octant, plane.mT @ values)
    total = total.view(*bins, w, w, channels, w).permute(5, 0, 3, 1, 4, 2, 6)
    return total.reshape(channels, *mesh.nodes)


def _read(field: Tensor, mesh: Mesh) -> Tensor:
    """A field on the mesh (c, n, n, n) at the atoms: (N, c)."""
    bins, channels, w = [n // _WIDTH for n in mesh.nodes], len(field), _WIDTH
    field = field.view(channels, bins[0], w, bins[1], w, bins[2], w).permute(1, 3, 5, 2, 4, 0, 6)
    field = field.reshape(math.prod(bins), w * w, channels * w)
    out = field.new_zeros(*mesh.atoms.shape, channels)
    for some, octant, plane, line in _octants(mesh, channels):
        lines = (plane @ field[octant]).unflatten(2, (channels, w))
        out[some] += (lines * line).sum(-1)
    return out.flatten(0, 1).index_select(0, mesh.place)


def _transform(field: Tensor, mesh: Mesh) -> Tensor:
    """The modes of a field (c, n, n, n), each direction cut before the next is transformed."""
    waves: Tensor = torch.fft.rfft(field, dim=3)[..., : mesh.modes[2] + 1]
    for dim in (2, 1):
        waves, m = torch.fft.fft(waves, dim=dim), mesh.modes[dim - 1]
        waves = torch.cat([waves.narrow(dim, 0, m + 1), waves.narrow(dim, -m, m)], dim)
    return waves


def _back(waves: Tensor, mesh: Mesh) -> Tensor:
    for dim in (1, 2):
        m, shape = mesh.modes[dim - 1], list(waves.shape)
        shape[dim] = mesh.nodes[dim - 1] - shape[dim]
        low, high = waves.narrow(dim, 0, m + 1), waves.narrow(dim, m + 1, m)
        waves = torch.cat([low, waves.new_zeros(shape), high], dim)
        waves = torch.fft.ifft(waves, dim=dim, norm="forward")
    field: Tensor = torch.fft.irfft(waves, mesh.nodes[2], dim=3, norm="forward")
    return field
