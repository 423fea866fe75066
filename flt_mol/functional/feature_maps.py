"""φ: positive softmax features with exp(q·k/√D) = E[φ(q)·φ(k)], and their random projections.

Everything is kept as log φ until the last step, where what is common to a whole system is taken
off first. Nothing is added inside φ: after a maximum has been subtracted, an eps of 1e-4 turns
attention uniform while all numbers stay finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flt_mol.functional._common import at_least_float32, draw_normal, without_autocast
from flt_mol.functional.packed import system_sizes


def gaussian_projection(
    num_features: int, dim: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """W (M, dim) with independent standard normal entries, float32 on CPU."""
    return draw_normal(num_features, dim, generator=generator)


def orthogonal_projection(
    num_features: int, dim: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """W (M, dim) whose rows are orthogonal within blocks of `dim`, each one standard normal.

    Directions are the columns of Q of a Gaussian's QR decomposition, made uniform by giving R a
    positive diagonal; lengths are those of independent Gaussian vectors [1, section 3.2].

    Args:
        num_features: M.
        dim: number of columns.
        generator: on CPU.

    Returns:
        float32 on CPU, the same numbers for the same generator on every machine's default dtype.

    References:
        [1] Choromanski et al., "Rethinking Attention with Performers", ICLR 2021.

    Example:
        >>> w = orthogonal_projection(3, 3, generator=torch.Generator().manual_seed(0))
        >>> off_diagonal = (w @ w.T).fill_diagonal_(0.0).abs().max()
        >>> bool(off_diagonal < 1e-5)
        True
    """
    blocks = []
    for start in range(0, num_features, dim):
        q, r = torch.linalg.qr(draw_normal(dim, dim, generator=generator))
        directions = (q * r.diagonal().sign()).T
        blocks.append(directions[: num_features - start])
    lengths = draw_normal(num_features, dim, generator=generator).norm(dim=-1, keepdim=True)
    projection: Tensor = torch.cat(blocks) * lengths
    return projection


def project_positions(basis: Tensor, weight: Tensor, projection: Tensor) -> Tensor:
    """W·Φ for Φ = T ∘ a without ever forming Φ: T·(W ∘ a)ᵀ.

    Args:
        basis: T (N, 2R), shared by all heads.
        weight: a (H, 2R) or (1, 2R).
        projection: W (H, M, 2R).

    Returns:
        (N, H, M), at least float32.
    """
    basis = at_least_float32(basis)
    with without_autocast(basis):
        folded = (projection * weight[:, None, :]).to(basis.dtype)
        return (basis @ folded.transpose(1, 2)).transpose(0, 1)


def softmax_log_features(
    x: Tensor,
    projection: Tensor,
    position_logits: Tensor | None = None,
    *,
    subtract_norm: bool = True,
) -> Tensor:
    """Logarithms of positive random features of exp(q·k/√D) [1].

    log φ_m(x) = w_m·x̂ − ‖x̂‖²/2 with x̂ = x D^{-1/4}, so the mean over m of φ_m(q) φ_m(k) has
    expectation exp(q·k/√D). With `position_logits` the features are those of the concatenation
    [Φ, x̂], up to the factor exp(−‖Φ‖²/2), which is the same for all rows of a head and cancels in
    attention.

    Args:
        x: queries or keys (N, H, D).
        projection: W (H, M, D), rows standard normal.
        position_logits: (N, H, M) of `project_positions`, or None.
        subtract_norm: whether to subtract ‖x̂‖²/2. For queries it is a constant of the row, which
            cancels; for keys it does not.

    Returns:
        (N, H, M), at least float32 whatever the autocast dtype.

    References:
        [1] Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, Lemma 1.
    """
    scale = x.shape[-1] ** -0.25
    rows = at_least_float32(x).transpose(0, 1)
    with without_autocast(rows):
        columns = (projection.to(rows.dtype) * scale).transpose(1, 2)
        if position_logits is None:
            logits = torch.bmm(rows, columns)
        else:
            logits = torch.baddbmm(position_logits.transpose(0, 1), rows, columns)
        if subtract_norm:
            logits.sub_(rows.square().sum(-1, keepdim=True) * (0.5 * scale**2))
    return logits.transpose(0, 1)


def stabilised_features(
    query_logits: Tensor, key_logits: Tensor, ptr: Tensor
) -> tuple[Tensor, Tensor]:
    """Exponentials of both logits, scaled so that attention's normaliser is never below 1.

    c_bhm, the largest key logit among the system's own rows, moves from keys to queries, then each
    query loses its largest logit over m: φ(q_i)·φ(k_j) changes by a factor of row i alone, which
    attention divides out. The feature that is largest for a query then meets a key sum ≥ 1, so
    logits of any size neither overflow nor leave 0/0. Nothing of another system enters.

    Args:
        query_logits: log φ(q) (N, H, M).
        key_logits: log φ(k) (N, H, M).
        ptr: (B + 1,), first row of each system.

    Returns:
        φ(q), φ(k), both (N, H, M) with entries in [0, 1].

    Example:
        >>> huge = torch.tensor([[900.0, -900.0]]).reshape(1, 1, 2)
        >>> stabilised_features(huge, huge, torch.tensor([0, 1]))
        (tensor([[[1., 0.]]]), tensor([[[1., 1.]]]))
    """
    queries, keys = query_logits.transpose(0, 1), key_logits.transpose(0, 1)
    shift = _largest_of_system(keys.detach(), ptr)
    queries = queries + shift
    queries = queries.sub_(queries.detach().amax(-1, keepdim=True)).exp_()
    return queries.transpose(0, 1), (keys - shift).exp_().transpose(0, 1)


def _largest_of_system(keys: Tensor, ptr: Tensor) -> Tensor:
    """The largest entry among the rows of the same system, for each row: (H, N, M) → (H, N, M).

    (H, 1, M) for a single system.
    """
    sizes = system_sizes(ptr, keys.shape[1])
    if len(sizes) == 1 and sizes[0] > 0:
        return keys.amax(1, keepdim=True)
    shift = torch.empty_like(keys)
    parts = zip(torch.split(keys, sizes, 1), torch.split(shift, sizes, 1), strict=True)
    for rows, out in parts:
        if rows.shape[1]:
            out.copy_(rows.amax(1, keepdim=True).expand_as(out))
    return shift
