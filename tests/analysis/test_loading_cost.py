"""The comparison of loaders reads the same systems in every way."""

import numpy as np
import pytest

from flt_mol.analysis.loading_cost import PLAIN, loading_cost
from flt_mol.data import convert, open_dataset

pytest.importorskip("torch_geometric")


@pytest.fixture
def files(oc20_data, tmp_path):
    distributed = oc20_data / "is2re_val_20" / "data.lmdb"
    convert(open_dataset(distributed), tmp_path / "compact.lmdb", workers=1)
    return distributed, tmp_path / "compact.lmdb"


def test_every_way_is_timed_and_compared_with_the_plain_one(files):
    cost = loading_cost(*files, batch_size=3, batches=2, rounds=2)
    assert cost.systems == 6
    assert len(cost.timings.seconds) == 6
    assert cost.speedup(PLAIN).median == 1.0
    for name in cost.timings.seconds:
        assert cost.per_second(name) == 6 / cost.timings.median(name)


def test_the_plain_way_reads_what_we_read(files):
    from flt_mol.analysis.loading_cost import _Plain

    plain = _Plain(files[0]).batch([4, 0, 4])
    ours = open_dataset(files[1]).batch([4, 0, 4])
    assert np.array_equal(plain.pos.numpy(), ours.positions.numpy())
    assert tuple(plain.sid.tolist()) == ours.sid
    assert plain.edge_index.shape[1] > 1000
    assert "edge_index" not in _Plain(files[0]).batch_without_graph([4])
