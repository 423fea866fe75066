"""Periodic systems for tests, and sums over their images written out with loops."""

import itertools

import torch

F64 = torch.float64
ALL_PBC = list(itertools.product([False, True], repeat=3))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def lattice_shifts(cell, pbc, reach=4):
    """All T (·, 3) up to `reach` cells away; 0 along axes that do not repeat."""
    ranges = [range(-reach, reach + 1) if repeats else range(1) for repeats in pbc.tolist()]
    return torch.tensor(list(itertools.product(*ranges)))


def batch(sizes=(5, 0, 1, 6), seed=0):
    """Triclinic cells of 3 to 5 Å with mixed pbc: positions, cell, pbc, ptr in float64."""
    generator = seeded(seed)
    count = len(sizes)
    cell = torch.diag(torch.tensor([3.0, 4.0, 5.0], dtype=F64)).repeat(count, 1, 1)
    cell = cell + 0.6 * torch.randn(count, 3, 3, generator=generator, dtype=F64)
    kinds = [[True, True, True], [True] * 3, [True, True, False], [False, True, True]]
    pbc = torch.tensor([kinds[b % len(kinds)] for b in range(count)])
    ptr = torch.tensor([0, *itertools.accumulate(sizes)])
    system = torch.repeat_interleave(torch.arange(count), torch.tensor(sizes))
    fractional = torch.rand(len(system), 3, generator=generator, dtype=F64)
    positions = (fractional[:, :, None] * cell[system]).sum(1)
    return positions, cell, pbc, ptr


def over_images(positions, cell, pbc, ptr, within, reach=4):
    """Rows, T and r_i − r_j − T·cell (n, n, 3) of each system and each T with atoms in reach."""
    for b in range(len(ptr) - 1):
        rows = slice(int(ptr[b]), int(ptr[b + 1]))
        r = positions[rows]
        for shift in lattice_shifts(cell[b], pbc[b], reach):
            vectors = r[:, None] - r[None] - (shift.to(r.dtype)[:, None] * cell[b]).sum(0)
            if (vectors.detach().norm(dim=-1) < within).any():
                yield rows, shift, vectors


def lengths(vectors):
    """‖x‖, with gradient 0 at x = 0."""
    squared = vectors.square().sum(-1)
    return torch.where(squared == 0, 0.0, torch.where(squared == 0, 1.0, squared).sqrt())


def supercell(positions, cell, times):
    """One system repeated: positions, cell, ptr; the first rows are the original atoms."""
    shifts = torch.tensor(list(itertools.product(*[range(n) for n in times])), dtype=cell.dtype)
    images = (shifts[:, :, None] * cell[0]).sum(1)
    tiled = (positions[None] + images[:, None]).flatten(0, 1)
    scaled = cell * torch.tensor(times, dtype=cell.dtype)[:, None]
    return tiled, scaled, torch.tensor([0, len(tiled)])


def rotation(seed=0):
    q, r = torch.linalg.qr(torch.randn(3, 3, generator=seeded(seed), dtype=F64))
    q = q * r.diagonal().sign()
    return q * torch.linalg.det(q).sign()


def kept_sizes(call):
    """Numbers of elements of the tensors that `call` saves for its backward pass."""
    kept = []

    def pack(x):
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call()
    return kept
