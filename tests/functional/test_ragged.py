import pytest
import torch

from flt_mol.functional.ragged import (
    ragged_layout,
    ragged_outer,
    ragged_product,
    ragged_transposed_product,
    systems_of,
)

H, D = 2, 3
ROWS = torch.tensor([0, 3, 3, 4, 6])
COLUMNS = torch.tensor([0, 2, 5, 5, 9])
PRESENT = torch.tensor([True, True, True, False])


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def cases():
    yield ragged_layout(ROWS, COLUMNS), 7, 10  # one row and one column of padding
    yield ragged_layout(ROWS, COLUMNS, PRESENT), 6, 9
    yield ragged_layout(torch.tensor([0]), torch.tensor([0])), 0, 0


def whole(blocks, layout, num_rows, num_columns):
    """The matrices (H, N, M) of all systems in one, zeros elsewhere."""
    out = blocks.new_zeros(H, num_rows, num_columns)
    rows, columns, pieces = layout.tolist()
    for b in range(len(rows) - 1):
        piece = blocks[:, pieces[b] : pieces[b + 1]]
        if piece.shape[1]:
            mask = torch.zeros(num_rows, num_columns, dtype=torch.bool)
            mask[rows[b] : rows[b + 1], columns[b] : columns[b + 1]] = True
            out = out.masked_scatter(mask.expand_as(out), piece)
    return out


@pytest.mark.parametrize("case", range(3))
def test_products_are_those_of_one_block_matrix(case):
    layout, n, m = list(cases())[case]
    blocks, x, y = draw(H, int(layout[2, -1])), draw(n, H, D, seed=1), draw(m, H, D, seed=2)
    matrix = whole(blocks, layout, n, m)
    forward = torch.einsum("hnm,mhd->nhd", matrix, y)
    torch.testing.assert_close(ragged_product(blocks, y, layout, n), forward)
    backward = torch.einsum("hnm,nhd->mhd", matrix, x)
    torch.testing.assert_close(ragged_transposed_product(blocks, x, layout, m), backward)
    outer = torch.einsum("nhd,mhd->hnm", x, y)
    found = whole(ragged_outer(x, y, layout, blocks.shape[1]), layout, n, m)
    inside = whole(torch.ones_like(blocks), layout, n, m)
    torch.testing.assert_close(found, outer * inside)


@pytest.mark.parametrize("case", [0, 1])
def test_first_and_second_derivatives(case):
    layout, n, m = list(cases())[case]
    size = int(layout[2, -1])
    blocks, x, y = draw(H, size), draw(n, H, D, seed=1), draw(m, H, D, seed=2)
    for function, inputs in (
        (lambda a, y: ragged_product(a, y, layout, n), (blocks, y)),
        (lambda a, x: ragged_transposed_product(a, x, layout, m), (blocks, x)),
        (lambda x, y: ragged_outer(x, y, layout, size), (x, y)),
    ):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_operations_keep_torchs_contract():
    layout, n, m = next(cases())
    size = int(layout[2, -1])
    blocks, x, y = draw(H, size), draw(n, H, D, seed=1), draw(m, H, D, seed=2)
    for name, inputs in (
        ("ragged_product", (blocks, y, layout, n)),
        ("ragged_transposed_product", (blocks, x, layout, m)),
        ("ragged_outer", (x, y, layout, size)),
    ):
        torch.library.opcheck(getattr(torch.ops.flt_mol, name).default, inputs)


def test_padding_and_other_systems_leave_no_trace():
    layout, n, m = next(cases())
    blocks, y = draw(H, int(layout[2, -1])).detach(), draw(m, H, D).detach()
    clean = ragged_product(blocks, y, layout, n)
    assert (clean[6:] == 0).all()
    y[9:], y[2:9] = float("nan"), 1e30
    assert torch.equal(ragged_product(blocks, y, layout, n)[:3], clean[:3])


def test_systems_without_matrix_are_passed_over():
    layout = ragged_layout(ROWS, COLUMNS, PRESENT)
    assert layout.tolist()[2] == [0, 6, 6, 6, 6]
    assert [rows.start for rows, _, _ in systems_of(layout)] == [0]
