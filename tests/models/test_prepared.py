"""Batches that are prepared: what is attached, what drops it, and one graph for all of them."""

import pytest
import torch
from conftest import KINDS, small_model

from flt_mol import Structures
from flt_mol.data import make_loader
from flt_mol.models import EnergyModel, named_config
from helpers import invariances as testing


def batch_of(*natoms):
    return testing.random_structures(torch.Generator().manual_seed(1), natoms=natoms)


def test_prepared_batches_give_the_same_and_search_nothing(monkeypatch):
    model, batch = small_model(**KINDS["both filters"]).eval(), batch_of(5, 1, 9, 14)
    expected, prepared = model(batch)["energy"], model.prepare_batch(batch)
    parts = [model.prepare_batch(one) for one in batch]
    loaded = next(iter(make_loader(list(batch), 4, prepare=model.prepare_batch)))
    for name in ("with_pairs", "with_reciprocal"):
        monkeypatch.setattr(Structures, name, None)
    assert model.prepare_batch(prepared) is prepared
    for one in (prepared, prepared.to("cpu"), Structures.cat(parts), loaded):
        torch.testing.assert_close(model(one)["energy"], expected)
    torch.testing.assert_close(model(prepared.select([3, 0]))["energy"], expected[[3, 0]])
    moved = prepared.moved(prepared.positions + 1)
    assert moved.pairs is None
    assert moved.reciprocal is None


def test_other_settings_and_derivatives_by_the_cell_prepare_again():
    model, batch = small_model(**KINDS["spectral"]).eval(), batch_of(5, 9)
    other = batch.with_reciprocal(k_max=0.2, padding=8.0)
    assert torch.equal(model(other)["energy"], model(batch)["energy"])
    prepared = model.prepare_batch(batch)
    prepared.cell.requires_grad_()
    assert torch.autograd.grad(model(prepared)["energy"].sum(), prepared.cell)[0].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flt-small", "emt-small", "flt-base"])
def test_a_prepared_model_is_one_graph_for_all_batches(name):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = EnergyModel(named_config(name)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    # Not 3 systems first: torch takes equal sizes for one, and that of space is fixed.
    for sizes in ((12, 20, 7, 9), (30, 5, 9, 14, 8, 21), (40, 3, 8), (11, 6)):
        batch, found = model.prepare_batch(batch_of(*sizes)), []
        for run in (model, compiled):
            model.zero_grad()
            energy = run(batch)["energy"]
            energy.sum().backward()
            grads = {n: x.grad for n, x in model.named_parameters() if x.grad is not None}
            found.append({"energy": energy, **grads})
        for key, expected in found[0].items():
            torch.testing.assert_close(found[1][key], expected, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
