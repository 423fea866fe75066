import pytest
import torch
from periodic import F64, batch, kept_sizes, seeded
from torch.autograd import gradcheck, gradgradcheck

from flt_mol.functional import group_budget, image_attention, neighbor_pairs
from flt_mol.functional.images import log_sum_over_images

H, D = 2, 3


def attend(q, k, v, ptr, i, j, w):
    label, image = torch.unique(i * len(q) + j, return_inverse=True)
    summed = log_sum_over_images(w, image, len(label))
    return image_attention(q, k, v, ptr, label // len(q), label % len(q), summed)


def case(sizes=(4, 0, 1, 3), seed=0):
    positions, cell, pbc, ptr = batch(sizes)
    pairs = neighbor_pairs(positions, cell, pbc, ptr, 4.2, self_pairs=True)
    generator = seeded(seed)
    q, k, v = torch.randn(3, len(positions), H, D, generator=generator, dtype=F64)
    w = torch.randn(len(pairs.index_i), H, generator=generator, dtype=F64)
    inputs = [x.clone().requires_grad_() for x in (q, k, v, w)]
    return inputs, ptr, pairs.index_i, pairs.index_j


def explicit(q, k, v, w, i, j):
    """Σ over pairs, images of one j each with its own weight, written with loops."""
    out = []
    for n in range(len(q)):
        mine = (i == n).nonzero().flatten().tolist()
        logits = torch.stack([(q[n] * k[j[p]]).sum(-1) / D**0.5 + w[p] for p in mine])
        weight = logits.softmax(0)
        out.append(sum(weight[a][:, None] * v[j[p]] for a, p in enumerate(mine)))
    return torch.stack(out)


def test_values_and_gradients_are_those_of_explicit_image_keys():
    inputs, ptr, i, j = case()
    assert len(torch.unique(torch.stack([i, j]), dim=1).T) < len(i)
    out = attend(*inputs[:3], ptr, i, j, inputs[3])
    expected = explicit(*inputs, i, j)
    torch.testing.assert_close(out, expected)
    seed = torch.randn(out.shape, generator=seeded(3), dtype=F64)
    for one, other in zip(
        torch.autograd.grad(out, inputs, seed),
        torch.autograd.grad(expected, inputs, seed),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_gradients_of_gradients():
    inputs, ptr, i, j = case((3, 2))

    def run(q, k, v, w):
        return attend(q, k, v, ptr, i, j, w)

    assert gradcheck(run, inputs, fast_mode=True)
    assert gradgradcheck(run, inputs, fast_mode=True)


def test_systems_in_one_group_or_each_alone():
    inputs, ptr, i, j = case((5, 2, 0, 3))
    together = attend(*inputs[:3], ptr, i, j, inputs[3])
    with group_budget(1):
        alone = attend(*inputs[:3], ptr, i, j, inputs[3])
    torch.testing.assert_close(alone, together)


def test_huge_logits_and_pairs_without_weight():
    (q, k, v, w), ptr, i, j = case()
    with torch.no_grad():
        w.fill_(-torch.inf)
        w[(i == j) & (i != 2)] = 1e4
    out = attend(100 * q, 100 * k, v, ptr, i, j, w)
    rows = [n for n in range(len(v)) if n != 2]
    torch.testing.assert_close(out[rows], v[rows])
    assert not out[2].any()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in gradients)


def test_weights_are_not_kept():
    inputs, ptr, i, j = case((12,))
    kept = kept_sizes(lambda: attend(*inputs[:3], ptr, i, j, inputs[3]))
    assert max(kept) <= max(len(i) * H, 12 * H * D)


def test_what_does_not_fit():
    (q, k, v, w), ptr, i, j = case()
    with pytest.raises(ValueError, match="log_weight"):
        image_attention(q, k, v, ptr, i, j, w[:-1])
    assert image_attention(q[:0], k[:0], v[:0], ptr[:1], i[:0], j[:0], w[:0]).shape == (0, H, D)
    with pytest.raises(ValueError, match="no pairs"):
        image_attention(q, k, v, ptr, i[:0], j[:0], w[:0])
    with pytest.raises(ValueError, match="ptr"):
        image_attention(q, k, v, ptr[:-1], i, j, w)


def test_images_drawn_together():
    w = torch.tensor([[0.25, 1e-30], [0.5, 1e-30], [0.0, 2.0]], dtype=F64)
    group = torch.tensor([0, 0, 1])
    log = w.log().requires_grad_()
    out = log_sum_over_images(log, group, 2)
    torch.testing.assert_close(out.exp(), torch.tensor([[0.75, 2e-30], [0, 2.0]], dtype=F64))
    (gradient,) = torch.autograd.grad(out[out.isfinite()].sum(), log)
    torch.testing.assert_close(gradient[:2, 0], torch.tensor([1 / 3, 2 / 3], dtype=F64))
    assert gradient.isfinite().all()
