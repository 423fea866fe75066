"""Replacement of `torch.nn.MultiheadAttention`, with its call, masks and layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flt_mol.nn.attention import AttentionInputs, FLTAttention, logit_factors
from flt_mol.nn.layout import layout_of, require

_HIDDEN, _LOWEST = -1e4, -1e30


class _NoFusedPath:
    """Anything with __torch_function__ among the weights turns torch's fused inference off."""

    requires_grad = False

    @classmethod
    def __torch_function__(cls, *_: object) -> object:
        return NotImplemented


class FLTMultiheadAttention(nn.Module):
    """`FLTAttention` behind the interface of `torch.nn.MultiheadAttention`.

    Takes the place of `self_attn` and `multihead_attn` in torch's Transformer layers. What differs
    from torch's module:

    - ``need_weights`` is False by default: weights are formed at quadratic cost.
    - Mode "exact" takes any ``attn_mask``; else it may be the causal mask, of a layer built with
      ``causal=True``, which is causal with and without it. −10⁴ and less in masks is −∞.
    - Rows of padding come out as 0, and a row whose keys are all masked as ``out(0)``, not NaN.
    - ``dropout`` acts on the attended values, since there is no matrix to drop from.
    - There are no ``add_bias_kv``, ``add_zero_attn``, and keys and values have the same width.

    Args:
        embed_dim: C.
        num_heads: H.
        dropout: probability, on the attended values.
        bias: whether the four linear maps have one.
        kdim: channels of keys and values, if not C.
        batch_first: whether tensors are (B, L, C) instead of (L, B, C).
        **settings: further arguments of `FLTAttention`: feature_map, rpe, mode, causal, …

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> layer.self_attn = FLTMultiheadAttention.from_torch(layer.self_attn, mode="auto")
        >>> layer(torch.randn(2, 10, 32)).shape
        torch.Size([2, 10, 32])
    """

    # torch's Transformer layers read these to decide on fused paths around `forward`.
    _qkv_same_embed_dim = False
    in_proj_bias = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        batch_first: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        # As torch's layers read them.
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        given: Any = {"dropout": dropout, "bias": bias, "context_dim": kdim}
        self.attention = FLTAttention(embed_dim, num_heads, **given, **settings)

    @property
    def in_proj_weight(self) -> _NoFusedPath:
        """Keeps torch's layers from computing attention themselves."""
        return _NoFusedPath()

    @property
    def out_proj(self) -> nn.Linear:
        """The output map, by torch's name."""
        return self.attention.out

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **settings: Any) -> FLTMultiheadAttention:
        """The same linear maps, with attention of this library between them.

        Args:
            module: without add_bias_kv and add_zero_attn, keys and values of the same width.
            **settings: what else `FLTAttention` takes.

        Raises:
            ValueError: a module with what this one has not.
        """
        if module.bias_k is not None or module.add_zero_attn or module.kdim != module.vdim:
            raise ValueError("add_bias_kv, add_zero_attn, vdim other than kdim are not known here")
        weight, bias = module.out_proj.weight, module.in_proj_bias is not None
        sizes = module.embed_dim, module.num_heads, module.dropout, bias, module.kdim
        layer = cls(*sizes, module.batch_first, **settings).to(weight.device, weight.dtype)
        own = layer.attention
        parts: Any = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        if module.in_proj_weight is not None:
            parts = module.in_proj_weight.chunk(3)
        maps = own.query, own.key, own.value, own.out
        pairs = [(linear.weight, part) for linear, part in zip(maps, (*parts, weight), strict=True)]
        if bias:
            biases = *module.in_proj_bias.chunk(3), module.out_proj.bias
            pairs += [(linear.bias, part) for linear, part in zip(maps, biases, strict=True)]
        for parameter, part in pairs:
            with torch.no_grad():
                parameter.copy_(part)
            parameter.requires_grad_(part.requires_grad)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            layer.requires_grad_(False)
        return layer.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention in torch's layout.

        Args:
            query: (L, B, C), or (B, L, C) if `batch_first`, or (L, C).
            key: as `query`, S rows of `kdim` channels; None, or the same object, for `query`.
            value: as `key`; None, or the same object, for `key`.
            key_padding_mask: (B, S) or (S,); bool, **True = ignore**, as torch has it, or float
                with 0 and −inf.
            need_weights: whether weights are returned.
            attn_mask: (L, S) or (B·H, L, S), bool, True = ignore, or float; see the class.
            average_attn_weights: whether weights are averaged over heads.
            is_causal: whether attention is causal: `attn_mask`, or this layer, says that already.
            positions: of the queries, for a layer with an RPE over ℓ > 1, in their layout.
            key_positions: of the keys, where they are another set.

        Returns:
            Rows as `query`, and weights (B, L, S) or (B, H, L, S), (L, S) or (H, L, S), or None.

        Raises:
            ValueError: masks that linear attention has no form for; shapes that do not fit.
        """
        key = query if key is None else key
        value = key if value is None else value
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(
                "nested tensors: give the TransformerEncoder enable_nested_tensor=False"
            )
        if self.attention.causal and key is not query:
            raise ValueError("a causal layer attends to its own rows: give key=None")
        x = self._batched(query)
        at = None if positions is None else self._batched(positions)
        shape = len(x), x.shape[1], self._batched(key).shape[1]
        real = _real(key_padding_mask, shape)
        given: AttentionInputs = {"mask": real}
        # Keys at other places than the queries are another set of rows, if of the same features.
        if key is not query or key_positions is not None:
            given = {"context": self._batched(key), "context_mask": real}
            if key_positions is not None:
                given["context_positions"] = self._batched(key_positions)
        if value is not key:
            given["context_values"] = self._batched(value)
        bias = self._bias(attn_mask, is_causal, *shape)
        out, weights = self._biased(x, at, given, bias)
        if need_weights:
            weights = self._weights(x, at, given) if weights is None else weights
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights[0] if query.dim() == 2 else weights
        else:
            weights = None
        if query.dim() == 2:
            return out[0], weights
        return out if self.batch_first else out.transpose(0, 1), weights

    def _batched(self, x: Tensor) -> Tensor:
        """(B, L, …) of rows as given."""
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _bias(
        self, attn_mask: Tensor | None, is_causal: bool, batch: int, rows: int, keys: int
    ) -> Tensor | None:
        """What is added to the logits; None where this layer does the same without."""
        layer = self.attention
        if attn_mask is None:
            if is_causal and not layer.causal:
                raise ValueError("is_causal: build this layer with causal=True")
            return None
        bias = _additive(attn_mask, "attn_mask")
        shapes = (rows, keys), (batch * layer.num_heads, rows, keys)
        if bias.shape not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ValueError(f"attn_mask has shape {tuple(bias.shape)}, expected {expected}")
        causal = (bias == torch.full_like(bias, -torch.inf).triu(1)).all()
        fits = causal if layer.causal else (bias == 0).all()
        if layer.mode == "exact":
            return bias if torch.compiler.is_compiling() or not bool(fits) else None
        if not layer.causal:
            require(fits | ~causal, "attn_mask is causal: build this layer with causal=True")
        what = "not the causal mask" if layer.causal else "for single pairs"
        require(fits, f"attn_mask is {what}: only mode='exact' has that (or use key_padding_mask)")
        return None

    def _biased(
        self, x: Tensor, at: Tensor | None, given: AttentionInputs, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs (B, L, C); with additive logits, in exact mode, also weights (B, H, L, S)."""
        layer, context = self.attention, given.get("context")
        if bias is None:
            return layer(x, at, **given), None
        layout, rows = layer.rows(x, at, given)
        keys = layout if context is None else layout_of(context, mask=given.get("context_mask"))
        query, key = logit_factors(rows)
        q, k, v = (
            of.unpack(y).transpose(1, 2)
            for of, y in ((layout, query), (keys, key), (keys, rows.value.to(key.dtype)))
        )
        bias = bias.to(q.dtype)
        bias = bias.unflatten(0, (-1, self.num_heads)) if bias.dim() == 3 else bias
        shown = (bias > -torch.inf).tril() if layer.causal else bias > -torch.inf
        if keys.mask is not None:
            shown = shown & keys.mask[:, None, None]
        # Rows that see nothing have weights of 0, without a NaN on the way.
        logits = torch.where(shown, q @ k.mT + bias, _LOWEST)
        weights = logits.softmax(-1) * shown
        out = (weights @ v).transpose(1, 2).flatten(2).to(rows.value.dtype)
        out = layer.out(layer.dropout(out))
        return out if layout.mask is None else out * layout.mask[..., None], weights

    def _weights(self, x: Tensor, at: Tensor | None, given: AttentionInputs) -> Tensor:
        """(B, H, L, S), zeros in rows and columns of padding."""
        keys, mask = given.get("context"), given.get("mask")
        masks = mask, mask if keys is None else given.get("context_mask")
        lengths = x.shape[1], (x if keys is None else keys).shape[1]
        weights = x.new_zeros(len(x), self.num_heads, *lengths)
        for b, matrix in enumerate(self.attention.matrices(x, at, **given)):
            rows, columns = (
                torch.arange(length, device=x.device) if mask is None else mask[b].nonzero()[:, 0]
                for length, mask in zip(lengths, masks, strict=True)
            )
            weights[b, :, rows[:, None], columns] = matrix.to(weights.dtype)
        return weights


def _real(key_padding_mask: Tensor | None, shape: tuple[int, int, int]) -> Tensor | None:
    """(B, S) bool, True for real keys, from torch's mask of those to ignore."""
    if key_padding_mask is None:
        return None
    bias = _additive(key_padding_mask, "key_padding_mask")
    real = bias == 0 if bias.dim() == 2 else (bias == 0)[None]
    if real.shape != shape[::2]:
        found = f"key_padding_mask has shape {tuple(bias.shape)}"
        raise ValueError(f"{found}, expected {shape[::2]}, True = ignore")
    require((real | (bias == -torch.inf)).all(), "key_padding_mask must hold 0 or −inf")
    return real


def _additive(mask: Tensor, name: str) -> Tensor:
    """−∞ where a mask is True, or a number that stands for −∞."""
    if mask.dtype == torch.bool:
        return torch.where(mask, -torch.inf, 0.0)
    if not mask.is_floating_point():
        raise ValueError(f"{name} is {mask.dtype}, expected bool, True = ignore, or float")
    return mask.masked_fill(mask <= _HIDDEN, -torch.inf)
