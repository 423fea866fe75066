"""φ: maps of queries and keys to features that are not negative, and their projections.

All act on the concatenations [Φ, x̂] of position features and x̂ = x D^{-1/4}, mostly without
forming them: W·[Φ, x̂] is a sum of two projections. Exponential maps are kept as log φ until the
last step, `stabilised_features`, where what is common to a whole system is taken off first.
Nothing is added inside φ: after a maximum has been subtracted, an eps of 1e-4 turns attention
uniform while all numbers stay finite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flt_mol.functional.groups import (
    at_least_float32,
    operator,
    settled,
    systems_of,
)

SOFTPLUS_TAIL, SOFTPLUS_LINEAR = -18.0, 40.0
# Where to cut x before exp(x) beside values of 1: far below rounding, far above underflow. Numbers
# below the smallest normal one make `exp` and products ten to eighty times slower on CPUs.
LEAST_EXPONENT = {torch.float32: -60.0, torch.float64: -600.0}


def gaussian_projection(
    num_features: int, dim: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """W (M, dim) with independent standard normal entries, float32 on CPU."""
    return torch.randn(num_features, dim, generator=generator, dtype=torch.float32, device="cpu")


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
        q, r = torch.linalg.qr(gaussian_projection(dim, dim, generator=generator))
        directions = (q * r.diagonal().sign()).T
        blocks.append(directions[: num_features - start])
    lengths = gaussian_projection(num_features, dim, generator=generator)
    projection: Tensor = torch.cat(blocks) * lengths.norm(dim=-1, keepdim=True)
    return projection


def project_positions(
    basis: Tensor, weight: Tensor, projection: Tensor, turn: Tensor | None = None
) -> Tensor:
    """W·Φ for Φ = T ∘ a + T⊥ ∘ c without ever forming Φ: the weights go into W.

    T = [cos, sin] and T⊥ = [sin, −cos], its quarter turn, so with W = [W_c, W_s] the product is
    T·[a W_c − c W_s, c W_c + a W_s]ᵀ.

    Args:
        basis: T (N, 2R), shared by all heads, or (N, H, 2R).
        weight: a (H, 2R) or (1, 2R).
        projection: W (H, M, 2R).
        turn: c (H, 2R) or (1, 2R), or None for 0.

    Returns:
        (N, H, M), at least float32.

    Example:
        >>> basis = torch.tensor([[0.6, 0.8]])  # cosine and sine of one phase
        >>> one, zero, w = torch.ones(1, 2), torch.zeros(1, 2), torch.ones(1, 1, 2)
        >>> project_positions(basis, one, w), project_positions(basis, zero, w, turn=one)
        (tensor([[[1.4000]]]), tensor([[[0.2000]]]))
    """
    basis = basis.to(torch.promote_types(basis.dtype, torch.float32))
    columns = projection * weight[:, None, :]
    if turn is not None:
        cosines, sines = (projection * turn[:, None, :]).chunk(2, dim=-1)
        columns = columns + torch.cat([-sines, cosines], dim=-1)
    columns = columns.to(basis.dtype).transpose(1, 2)
    with torch.autocast(basis.device.type, enabled=False):
        # Laid out by head: as one product with T, torch would rearrange the result.
        by_head = basis.transpose(0, 1) if basis.dim() == 3 else basis.expand(len(columns), -1, -1)
        return torch.bmm(by_head, columns).transpose(0, 1)


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
        position_logits: (N, H, M) of `project_positions` or None.
        subtract_norm: whether to subtract ‖x̂‖²/2. For queries it is a constant of the row, which
            cancels; for keys it does not.

    Returns:
        (N, H, M), at least float32 whatever the autocast dtype.

    References:
        [1] Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, Lemma 1.
    """
    scale = x.shape[-1] ** -0.25
    rows = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(0, 1)
    with torch.autocast(rows.device.type, enabled=False):
        columns = (projection.to(rows.dtype) * scale).transpose(1, 2)
        if position_logits is None:
            logits = torch.bmm(rows, columns)
        else:
            at = position_logits.transpose(0, 1).to(rows.dtype)
            logits = torch.baddbmm(at, rows, columns)
        if subtract_norm:
            logits.sub_(rows.square().sum(-1, keepdim=True) * (0.5 * scale**2))
    return logits.transpose(0, 1)


def hyperbolic_log_features(
    x: Tensor,
    projection: Tensor,
    position_logits: Tensor | None = None,
    *,
    subtract_norm: bool = True,
) -> Tensor:
    """Logarithms of positive random features in opposite pairs, w and −w [1, Lemma 1].

    log φ_{±m}(x) = ±w_m·x̂ − ‖x̂‖²/2: of the same expectation as `softmax_log_features` of as many
    features, for half the products and of smaller variance. The factor 1/√(2M) cancels.

    Args:
        x: queries or keys (N, H, D).
        projection: W (H, M, D), rows standard normal.
        position_logits: (N, H, M) of `project_positions`, or None.
        subtract_norm: see `softmax_log_features`.

    Returns:
        (N, H, 2M), at least float32 whatever the autocast dtype.

    References:
        [1] Choromanski et al., "Rethinking Attention with Performers", ICLR 2021.
    """
    logits = softmax_log_features(x, projection, position_logits, subtract_norm=False)
    both = torch.cat([logits, -logits], dim=-1)
    if subtract_norm:
        both = both - at_least_float32(x).square().sum(-1, keepdim=True) / (2 * x.shape[-1] ** 0.5)
    return both


def relu_features(x: Tensor, projection: Tensor, position_logits: Tensor | None = None) -> Tensor:
    """ReLU(W [Φ, x̂]): the map of the paper's image model [1], an attention of its own kind.

    Positions act as further inputs here, no longer as the exponential of a mask. A row whose
    features are all 0 has no attention: its output is 0.

    Args:
        x: queries or keys (N, H, D).
        projection: W (H, M, D).
        position_logits: (N, H, M) of `project_positions`, or None.

    Returns:
        (N, H, M), at least float32 whatever the autocast dtype.

    References:
        [1] Choromanski et al., "Learning a Fourier Transform for Linear Relative Positional
        Encodings in Transformers", AISTATS 2024.
    """
    logits = softmax_log_features(x, projection, position_logits, subtract_norm=False)
    return logits.clamp(min=0.0)


def softplus_log_features(
    x: Tensor,
    projection: Tensor,
    bias: Tensor,
    position_logits: Tensor | None = None,
) -> Tensor:
    """Log softplus(W [Φ, x̂] + b), for learned W and b: positive features of any size.

    As logarithms they go through `stabilised_features`: softplus itself is 0 below −104 in
    float32, and a query with such logits only would lose its attention and its gradient.

    Args:
        x: queries or keys (N, H, D).
        projection: W (H, M, D).
        bias: b (H, M).
        position_logits: (N, H, M) of `project_positions`, or None.

    Returns:
        (N, H, M), at least float32 whatever the autocast dtype.

    Example:
        >>> zero = torch.zeros(1, 1, 1)
        >>> softplus_log_features(zero, zero, torch.tensor([[-1000.0]]))
        tensor([[[-1000.]]])
    """
    logits = softmax_log_features(x, projection, position_logits, subtract_norm=False)
    logits = logits + bias.to(logits.dtype)
    # log(log(1 + e^z)) = z − e^z/2 + O(e^2z): exact to rounding, in float64 too, below −18.
    tail = logits.clamp(max=SOFTPLUS_TAIL)
    tail = tail - 0.5 * tail.exp()
    head = softplus(logits.clamp(min=SOFTPLUS_TAIL), threshold=SOFTPLUS_LINEAR).log()
    return torch.where(logits < SOFTPLUS_TAIL, tail, head)


def elu_features(x: Tensor, position_features: Tensor | None = None) -> Tensor:
    """elu([Φ, x̂]) + 1, without any projection [1]: e^u for u < 0, 1 + u above, M = 2R + D.

    Args:
        x: queries or keys (N, H, D).
        position_features: Φ or Ψ (N, H, 2R) or (N, 1, 2R), or None.

    Returns:
        (N, H, 2R + D), at least float32 whatever the autocast dtype.

    References:
        [1] Katharopoulos et al., "Transformers are RNNs", ICML 2020, equation 7.

    Example:
        >>> elu_features(torch.tensor([[[-16.0]], [[2.0]]])).flatten()
        tensor([1.1254e-07, 3.0000e+00])
    """
    rows = at_least_float32(x) * x.shape[-1] ** -0.25
    if position_features is not None:
        positions = position_features.to(rows.dtype).expand(-1, x.shape[1], -1)
        rows = torch.cat([positions, rows], dim=-1)
    # Not elu(u) + 1, whose e^u − 1 + 1 keeps no digit of a small e^u.
    return torch.where(rows > 0, rows + 1, rows.clamp(max=0.0).exp())


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
        φ(q) (N, H, M), φ(k) (K, H, M) with entries in [0, 1], those below e⁻⁶⁰ (float64: e⁻⁶⁰⁰)
        raised to that, which is far below rounding and spares numbers that are slow.

    Raises:
        ValueError: offsets that decrease or end beyond the rows, or are of different numbers of
            systems.

    Example:
        >>> huge = torch.tensor([[900.0, -900.0]]).reshape(1, 1, 2)
        >>> queries, keys = stabilised_features(huge, huge, torch.tensor([0, 1]))
        >>> queries.flatten(), keys.flatten()
        (tensor([1.0000e+00, 8.7565e-27]), tensor([1., 1.]))
    """
    key_ptr = ptr if key_ptr is None else key_ptr
    queries, keys = (x.transpose(0, 1) for x in settled(query_logits, key_logits))
    queries, keys = _stabilised(queries, keys, ptr, key_ptr)
    return queries.transpose(0, 1), keys.transpose(0, 1)


@operator("stabilised_features")
def _stabilised(
    queries: Tensor, keys: Tensor, ptr: Tensor, key_ptr: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = queries.new_empty(queries.shape), keys.new_empty(keys.shape)
    least = LEAST_EXPONENT[queries.dtype]
    systems = systems_of(ptr, queries.shape[1])
    key_systems = systems if key_ptr is ptr else systems_of(key_ptr, keys.shape[1], "key_ptr")
    for rows, own in zip(systems, key_systems, strict=True):
        peak = keys.new_zeros(())
        if own.stop > own.start:
            peak = keys[:, own].amax(1, keepdim=True)
        torch.sub(keys[:, own], peak, out=outputs[1][:, own]).clamp_(min=least).exp_()
        q = torch.add(queries[:, rows], peak, out=outputs[0][:, rows])
        q.sub_(q.amax(-1, keepdim=True)).clamp_(min=least).exp_()
    for out, used in zip(outputs, (ptr, key_ptr), strict=True):
        out[:, int(used[-1]) :] = 0.0
    return outputs


@_stabilised.register_fake
def _(queries: Tensor, keys: Tensor, ptr: Tensor, key_ptr: Tensor) -> tuple[Tensor, Tensor]:
    return queries.new_empty(queries.shape), keys.new_empty(keys.shape)


def _save_outputs(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)


def _backward(ctx: Any, grad_queries: Tensor, grad_keys: Tensor) -> tuple[Tensor | None, ...]:
    queries, keys = ctx.saved_tensors
    return grad_queries * queries, grad_keys * keys, None, None


_stabilised.register_autograd(_backward, setup_context=_save_outputs)
