"""Checks of layers beside `helpers.invariances`: gradients, dtypes, states, padding, partners."""

import io
import math
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatch

import torch
from torch import nn

from helpers.invariances.invariance import check_batch_equals_alone
from helpers.invariances.layers import (
    EnergyLayer,
    agree,
    evaluated,
    evaluating,
    fitted,
    outputs,
    same,
)
from helpers.invariances.rows import Rows, random_rows, seeded

# A gradient smaller than this share of the largest one, in float64, is rounding.
_INVISIBLE = 1e-10


class PaddedLayer(nn.Module):
    """A module or function on padded rows as a layer under test, which takes packed ones.

    `call` is (module, x (B, L, C), positions (B, L, ℓ) or None, mask (B, L) bool, True = real) →
    (B, L, C'); the default is ``module(x, positions, mask=mask)``.
    """

    def __init__(self, module, call=None):
        super().__init__()
        self.module = module
        self.call = call or (lambda module, x, r, mask: module(x, r, mask=mask))

    def forward(self, rows):
        """Rows to (N, C'), without the padding."""
        out, mask = filled(self, rows, 0.0, extra=0)
        return out[mask]


def check_gradients(layer, rows, *, invisible=()):
    """Every trainable parameter gets a gradient: one that is finite and not zero, in float64.

    `invisible` are patterns of names (``*.key.bias``) that outputs cannot depend on.
    """
    double, rows = fitted(deepcopy(layer).double(), rows)
    named = _trainable(double)
    with evaluating(double):
        out = outputs(double, rows.to(torch.float64))
    if not named or not out.requires_grad:
        raise AssertionError("the outputs do not depend on any trainable parameter")
    direction = torch.randn(out.shape, generator=seeded(), dtype=torch.float32).to(out)
    options = {"allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad(out, list(named.values()), direction, **options)
    sizes = [float(g.abs().max()) if g.numel() else 0.0 for g in found]
    threshold = _INVISIBLE * max((size for size in sizes if size < math.inf), default=0.0)
    bad = {}
    for name, size in zip(named, sizes, strict=True):
        hidden = any(fnmatch(name, f"*{pattern}") for pattern in invisible)
        if not size < math.inf or (size <= threshold) != hidden:
            bad[name] = size
    if bad:
        raise AssertionError(f"parameters without a proper gradient, with its size: {bad}")


def check_coincident(layer, rows, *, second=False):
    """Rows in one place have finite outputs and gradients, by features and by positions.

    Two rows of each system are put in one place, and all rows of the largest. With `second`,
    gradients of the gradients must be finite too, as training on forces needs.
    """
    layer, rows = fitted(layer, rows)
    positions = rows.placed().detach().clone()
    for start, size in zip(rows.ptr.tolist(), rows.sizes.tolist(), strict=False):
        stop = start + (size if size == int(rows.sizes.max()) else min(size, 2))
        positions[start:stop] = positions[start : start + 1]
    leaves = [positions.requires_grad_(), rows.x.detach().clone().requires_grad_()]
    with evaluating(layer):
        out = outputs(layer, replace(rows, positions=leaves[0], x=leaves[1]))
        options = {"create_graph": second, "allow_unused": True}
        found = torch.autograd.grad(out.square().sum(), leaves, **options)
        if found[0] is None:
            raise AssertionError("outputs do not depend on positions")
        if second and found[0].requires_grad:
            found += torch.autograd.grad(found[0].square().sum(), leaves, allow_unused=True)
    names = ("outputs", "gradient by positions", "gradient by x", "second gradient", "by x")
    for name, values in zip(names, (out, *found), strict=False):
        bad = [] if values is None else (~values.isfinite()).any(1).nonzero().flatten().tolist()
        if bad:
            raise AssertionError(f"{name} of rows {bad} are not finite where rows coincide")


def check_save_load(layer, build, rows, *, tolerance=0.0):
    """A second instance, made by `build()`, has the outputs of the first with its state_dict.

    The state goes through `torch.save` and `torch.load(weights_only=True)`, as in a file. Let
    `build` use another seed, so that what is drawn but not saved shows; so do random outputs.
    """
    other, stream = build(), io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    wrong = other.load_state_dict(torch.load(stream, weights_only=True), strict=False)
    if any(wrong):
        raise AssertionError(f"the state_dict does not fit a second instance: {wrong}")
    (layer_, rows_), (other_, _) = fitted(layer, rows), fitted(other, rows)
    first, second = evaluated(layer_, rows_), evaluated(other_, rows_)
    return same(layer_, first, second, tolerance, "from a layer to one with its saved state")


def check_dtype(layer, rows, *, tolerance=1e-5):
    """Outputs have the dtype of `x`, and float32 ones agree with float64 ones.

    Tried: all in float64; all in float32; float64 positions and cells beside float32 features.
    """
    layer, rows = fitted(layer, rows)
    double, single = rows.to(torch.float64), rows.to(torch.float32)
    outs = []
    for given in (double, single, replace(double, x=single.x)):
        dtype = given.x.dtype
        copy = deepcopy(layer).to(dtype) if isinstance(layer, nn.Module) else layer
        outs.append(evaluated(copy, given))
        if outs[-1].dtype != dtype:
            raise AssertionError(f"outputs of {dtype} rows are {outs[-1].dtype}")
    change = "from float64 to float32"
    return max(same(layer, outs[0], second, tolerance, change) for second in outs[1:])


def check_autocast(layer, rows, dtype=torch.bfloat16, *, tolerance=0.05):
    """Under autocast, outputs are near those without, and all gradients are finite."""
    layer, rows = fitted(layer, rows)
    first = evaluated(layer, rows)
    leaves = {"x": rows.x.detach().clone().requires_grad_(), **_trainable(layer)}
    with evaluating(layer):
        with torch.autocast(rows.x.device.type, dtype=dtype):
            out = outputs(layer, replace(rows, x=leaves["x"]))
        total = out.float().square().sum()
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    for name, gradient in zip(leaves, gradients, strict=True):
        if gradient is not None and not bool(gradient.isfinite().all()):
            raise AssertionError(f"the gradient of {name} is not finite under autocast to {dtype}")
    return same(layer, first, out, tolerance, f"under autocast to {dtype}")


def check_alone(layer, rows, *, tolerance=1e-5, larger=50):
    """`check_batch_equals_alone`, and beside large partners, whose features are larger or NaN.

    Between two partners `larger` times the largest system, in reverse, whose features are as large
    as its own, 50 times as large, or NaN.
    """
    error = check_batch_equals_alone(layer, rows, tolerance=tolerance)
    layer, rows = fitted(layer, rows)
    parts = list(rows)
    alone = torch.cat([evaluated(layer, part) for part in parts[::-1]])
    partner = _partner(max(parts, key=lambda part: part.num_rows), larger)
    for factor in (1.0,) if isinstance(layer, EnergyLayer) else (1.0, 50.0, float("nan")):
        other = replace(partner, x=factor * partner.x)
        beside = evaluated(layer, Rows.cat([other, *parts[::-1], other]))
        kept = beside[partner.num_rows : partner.num_rows + rows.num_rows]
        words = f"beside {partner.num_rows} rows, {factor:g} times the size"
        error = max(error, same(layer, alone, kept, tolerance, words))
    return error


def _partner(part, times):
    """One system of `times` the rows of another, in random places."""
    partner = part.taken(torch.arange(part.num_rows).repeat(times), times * part.ptr)
    if part.positions is None:
        return partner
    pbc = False if part.pbc is None else part.pbc[0].tolist()
    dim, dtype = part.positions.shape[1], part.positions.dtype
    size = [partner.num_rows]
    other = random_rows(seeded(), size, 0, dim=dim, periodic=pbc, dtype=dtype)
    cell = None if part.cell is None else other.cell
    return replace(partner, positions=other.positions, cell=cell)


def check_empty_and_single_atom(layer, rows, *, tolerance=1e-5):
    """Systems of one row and of none are finite, and leave the others' outputs as they are."""
    layer, rows = fitted(layer, rows)
    largest = max(rows, key=lambda part: part.num_rows)
    if rows.cell is not None:
        largest = replace(largest, cell=0 * largest.cell, pbc=largest.pbc & False)
    single, empty = (largest.taken(torch.arange(n), rows.ptr.new_tensor([0, n])) for n in (1, 0))
    if evaluated(layer, empty).numel():
        raise AssertionError("a system without rows has outputs")
    expected = torch.cat([evaluated(layer, rows), evaluated(layer, single)])
    mixed = evaluated(layer, Rows.cat([empty, rows, empty, single, empty]))
    return same(layer, expected, mixed, tolerance, "when small systems joined the batch")


def check_padding(layer, rows, *, tolerance=0.0):
    """The content of padding (0, 10⁶, NaN) does not affect values or gradients, bit for bit.

    With padding behind and before the real rows of a `PaddedLayer`: outputs of real rows, and the
    gradients of all parameters and of real rows, are the same; outputs at padding are zero.
    """
    for before in (False, True):
        first = {}
        for filler in (0.0, 1e6, float("nan")):
            found = _values_and_gradients(layer, rows, filler, before)
            first = first or found
            for name, value in found.items():
                agree(
                    f"{name} changed where padding holds {filler:g}", first[name], value, tolerance
                )


def check_causality(layer, rows, *, tolerance=1e-6):
    """Rows of a system that come later leave no trace in the outputs of those before.

    From one third and from two thirds of each system on, features and positions are multiplied by
    50, and then removed: earlier outputs must stay, and their gradients by later features be 0.
    """
    errors = []
    whole = evaluated(layer, rows)
    place = torch.arange(rows.num_rows) - rows.ptr[rows.system]
    for share in (1 / 3, 2 / 3):
        cut = (share * rows.sizes).ceil().to(torch.int64)
        early = place < cut[rows.system]
        scale = torch.where(early, 1.0, 50.0).to(rows.x)[:, None]
        positions = None if rows.positions is None else scale * rows.positions
        larger = replace(rows, x=scale * rows.x, positions=positions)
        removed = rows.taken(early.nonzero()[:, 0], torch.cat([cut.new_zeros(1), cut.cumsum(0)]))
        for change, after in (
            ("when later rows were 50 times as large", evaluated(layer, larger)[early]),
            ("when later rows were removed", evaluated(layer, removed)),
        ):
            errors.append(same(layer, whole[early], after, tolerance, change))
        x = rows.x.detach().clone().requires_grad_()
        with evaluating(layer):
            out = outputs(layer, replace(rows, x=x))
            (gradient,) = torch.autograd.grad(out[early].square().sum(), x)
        expected = torch.where(early[:, None], gradient, 0)
        words = "gradients of outputs by later rows are not 0"
        errors.append(agree(words, expected, gradient, tolerance))
    return max(errors)


def filled(layer, rows, filler, extra=2, before=False):
    """Outputs (B, L, C') of a `PaddedLayer`, and where rows are real; padding holds `filler`."""
    mask = torch.arange(int(rows.sizes.max()) + extra) < rows.sizes[:, None]
    mask = mask.flip(1) if before else mask

    def padded(values):
        out = values.new_full((*mask.shape, values.shape[-1]), filler)
        out[mask] = values
        return out

    positions = None if rows.positions is None else padded(rows.positions)
    return layer.call(layer.module, padded(rows.x), positions, mask), mask


def _values_and_gradients(layer, rows, filler, before):
    """Outputs at real rows, gradients of their squares' sum; padding's outputs are checked."""
    leaves = {"x": rows.x.detach().clone().requires_grad_()}
    if rows.positions is not None:
        leaves["positions"] = rows.positions.detach().clone().requires_grad_()
    with evaluating(layer):
        out, mask = filled(layer, replace(rows, **leaves), filler, before=before)
        if not bool((out[~mask] == 0).all()):
            raise AssertionError(f"outputs at padding of {filler:g} are not zero")
        named = {**leaves, **_trainable(layer)}
        total = out[mask].square().sum()
        gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    changes = zip(named, gradients, strict=True)
    found = {f"the gradient of {name}": g for name, g in changes if g is not None}
    return {"outputs": out[mask].detach(), **found}


def _trainable(module):
    named = module.named_parameters() if isinstance(module, nn.Module) else ()
    return {name: p for name, p in named if p.requires_grad}
