"""φ: maps of the concatenations [Φ, x̂] of position features and x̂ = x D^{-1/4} to features ≥ 0.

W·[Φ, x̂] is a sum of two projections, so [Φ, x̂] is mostly not formed. Exponential maps are kept as
log φ until `stabilised_features`, which takes off what is common to a whole system. Nothing is
added inside φ: beside a subtracted maximum an eps of 1e-4 turns attention uniform unnoticed.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flt_mol.functional.fourier import PositionFeatures
from flt_mol.functional.groups import LOWEST, largest_per_system, settled, system_index

# Where exp(x) beside values of 1 becomes 0: far below rounding, far above underflow. Numbers below
# the smallest normal one make `exp` and products ten to eighty times slower on CPUs.
LEAST_EXPONENT = {torch.float32: -60.0, torch.float64: -600.0}


def orthogonal_projection(
    num_features: int, dim: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """W (M, dim) whose rows are orthogonal within blocks of `dim`, each one standard normal.

    Directions are the columns of Q of a Gaussian's QR decomposition, made uniform by giving R a
    positive diagonal; lengths are those of independent Gaussian vectors (Choromanski et al.,
    ICLR 2021, section 3.2, see `softmax_log_features`). float32 on CPU.

    Examples:
        >>> w = orthogonal_projection(3, 3, generator=torch.Generator().manual_seed(0))
        >>> off_diagonal = (w @ w.T).fill_diagonal_(0.0).abs().max()
        >>> bool(off_diagonal < 1e-5)
        True
    """
    draw = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    blocks = []
    for start in range(0, num_features, dim):
        q, r = torch.linalg.qr(draw(dim, dim))
        directions = (q * r.diagonal().sign()).T
        blocks.append(directions[: num_features - start])
    lengths = draw(num_features, dim)
    projection: Tensor = torch.cat(blocks) * lengths.norm(dim=-1, keepdim=True)
    return projection


def softmax_log_features(
    x: Tensor,
    projection: Tensor,
    at: PositionFeatures | None = None,
    position_projection: Tensor | None = None,
    *,
    key: bool = False,
    subtract_norm: bool = True,
) -> Tensor:
    """Logarithms of positive random features of exp(q·k/√D) [1].

    log φ_m(x) = w_m·x̂ − ‖x̂‖²/2 with x̂ = x D^{-1/4}, so the mean over m of φ_m(q) φ_m(k) has
    expectation exp(q·k/√D). With positions the features are those of [Φ, x̂], for keys [Ψ, x̂], up
    to exp(−‖Φ‖²/2), which is the same for all rows of a head and cancels in attention.

    Φ and Ψ, of the form T ∘ a + T⊥ ∘ c, are not formed: their weights go into W. T = [cos, sin] and
    T⊥ = [sin, −cos], so with W = [W_c, W_s] the product is T·[a W_c − c W_s, c W_c + a W_s]ᵀ.

    Args:
        x: queries or keys (N, H, D).
        projection: the columns of W (H, M, D) for x̂, rows standard normal.
        at: Φ and Ψ of the rows, or None.
        position_projection: the columns of W (H, M, 2R) for Φ and Ψ, or None.
        key: whether rows are keys.
        subtract_norm: whether to subtract ‖x̂‖²/2. For queries it is a constant of the row, which
            cancels; for keys it does not.

    Returns:
        (N, H, M), at least float32 for any autocast dtype.

    References:
        [1] Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, Lemma 1.
    """
    scale = x.shape[-1] ** -0.25
    rows = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(0, 1)
    columns = (projection.to(rows.dtype) * scale).transpose(1, 2)
    with torch.autocast(rows.device.type, enabled=False):
        if at is None or position_projection is None:
            logits = torch.bmm(rows, columns)
        else:
            weight, turn = (at.key_weight, at.key_turn) if key else (at.query_weight, None)
            weighted = position_projection * weight[:, None, :]
            if turn is not None:
                cosines, sines = (position_projection * turn[:, None, :]).chunk(2, dim=-1)
                weighted = weighted + torch.cat([-sines, cosines], dim=-1)
            # Laid out by head: as one product with T, torch would rearrange the result.
            basis = at.basis.to(rows.dtype)
            basis = basis.transpose(0, 1) if basis.dim() == 3 else basis.expand(len(rows), -1, -1)
            logits = torch.bmm(basis, weighted.to(rows.dtype).transpose(1, 2))
            logits = logits.baddbmm_(rows, columns)
        if subtract_norm:
            # Not sub_ or alpha=, whose gradients are formed for every m before they are summed.
            logits.add_(rows.square().sum(-1, keepdim=True) * (-0.5 * scale**2))
    return logits.transpose(0, 1)


def softplus_log_features(logits: Tensor) -> Tensor:
    """Log softplus(z) of logits z of any size, for z = W [Φ, x̂] + b with learned W and b.

    softplus itself is 0 below −104 in float32, and a query with such logits only would lose its
    attention and its gradient; logarithms go through `stabilised_features`.

    Examples:
        >>> softplus_log_features(torch.tensor([-1000.0, 1000.0]))
        tensor([-1000.0000,     6.9078])
    """
    # log(log(1 + e^z)) = z − e^z/2 + O(e^2z): exact to rounding, in float64 too, below −18.
    tail = logits.clamp(max=-18.0)
    head = softplus(logits.clamp(min=-18.0), threshold=40.0).log()
    return torch.where(logits < -18.0, tail - 0.5 * tail.exp(), head)


def stabilised_features(
    query_logits: Tensor, key_logits: Tensor, ptr: Tensor, key_ptr: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Exponentials of both logits, scaled so that attention's normaliser is never below 1.

    c_bhm, the largest key logit among the system's own keys, moves from keys to queries, then each
    query loses its largest logit over m: φ(q_i)·φ(k_j) changes by a factor of row i alone, which
    attention divides out. The feature that is largest for a query then meets a key sum ≥ 1, so
    logits of any size neither overflow nor leave 0/0. Nothing of another system enters.

    Maxima are constants to autograd: gradients are those of attention as a whole.

    Args:
        query_logits: log φ(q) (N, H, M).
        key_logits: log φ(k) (K, H, M).
        ptr: (B + 1,), first row of each system; rows beyond the last offset are padding, φ = 0.
        key_ptr: (B + 1,), first key of each system where keys are another set; else K = N.

    Returns:
        φ(q) (N, H, M), φ(k) (K, H, M) with entries in [0, 1]. Those below e⁻⁶⁰ (float64: e⁻⁶⁰⁰),
        far below rounding, are 0, as those of logits of −∞ are.

    Raises:
        ValueError: offsets that decrease or end beyond the rows, or are of different numbers of
            systems.

    Examples:
        >>> huge = torch.tensor([[900.0, -900.0]]).reshape(1, 1, 2)
        >>> queries, keys = stabilised_features(huge, huge, torch.tensor([0, 1]))
        >>> queries.flatten(), keys.flatten()
        (tensor([1., 0.]), tensor([1., 1.]))
    """
    queries, keys = settled(query_logits, key_logits)
    key_ptr = ptr if key_ptr is None else key_ptr
    (queries, system), (keys, own) = _systems(queries, ptr), _systems(keys, key_ptr)
    level = largest_per_system(keys, key_ptr)
    queries = queries + level[system]
    return features_of(queries - row_level(queries)), features_of(keys - level[own])


def _systems(x: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
    """Rows, those of padding −∞, and the system of each."""
    system = system_index(ptr, x.shape[0])
    return x.masked_fill((system == ptr.shape[0] - 1)[:, None, None], -torch.inf), system


def row_level(x: Tensor) -> Tensor:
    """The largest of each row (…, M), detached, or what can be taken off −∞: (…, 1)."""
    return x.detach().amax(-1, keepdim=True).clamp_(min=LOWEST[x.dtype])


def features_of(x: Tensor) -> Tensor:
    """exp(x) of a tensor that nothing else needs; 0 below e⁻⁶⁰, in float64 e⁻⁶⁰⁰."""
    return torch.threshold_(x, LEAST_EXPONENT[x.dtype], -torch.inf).exp_()
