"""Tensors that torch stores in other ways than most."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from flt_mol.data import open_dataset
from flt_mol.data.pickles.unpickling import unpickle


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_types_without_a_storage_of_their_own(dtype: torch.dtype, protocol: int) -> None:
    whole = torch.arange(6).to(dtype).reshape(2, 3)
    fields = {"whole": whole, "part": whole[:, 1:], "none": whole[:0]}
    record = unpickle(pickle.dumps(fields, protocol=protocol), "here")
    for name, tensor in fields.items():
        assert record[name].dtype == dtype
        assert torch.equal(record[name], tensor)
        assert record.describe(name) == ("tensor", tuple(tensor.shape))


def test_types_that_numpy_does_not_have_are_named(write_lmdb: Any, make_record: Any) -> None:
    bad = torch.zeros(6).to(torch.float8_e4m3fn)
    records = {0: make_record(pos=bad), 1: make_record(tags=torch.ones(6).to(torch.uint16))}
    dataset = open_dataset(write_lmdb(records))
    with pytest.raises(ValueError, match=r"key 0.*field pos: .*torch\.float8_e4m3fn"):
        dataset[0]
    assert dataset[1].tags.tolist() == [1] * 6
    assert dataset[1].tags.dtype == torch.int64
    assert torch.equal(dataset.batch([1]).tags, dataset[1].tags)


class _Call:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.pair = function, arguments

    def __reduce__(self) -> Any:
        return self.pair


def _untyped(numbers: torch.Tensor) -> Any:
    return numbers.__reduce_ex__(4)[1][0]


BYTES = torch.arange(3).to(torch.uint16)
REBUILD = torch._utils._rebuild_tensor_v3
DAMAGED = {
    "no type": (_untyped(BYTES), 0, (3,), (1,), False, {}),
    "another type": (_untyped(BYTES), 0, (3,), (1,), False, {}, "uint16"),
    "half a number": (_untyped(torch.arange(3).byte()), 0, (1,), (1,), False, {}, torch.uint16),
    "numbers": (_untyped(torch.arange(3)), 0, (3,), (1,), False, {}, torch.uint16),
    "beyond": (_untyped(BYTES), 0, (4,), (1,), False, {}, torch.uint16),
    "before": (_untyped(BYTES), -1, (1,), (1,), False, {}, torch.uint16),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_ones_are_refused(name: str) -> None:
    data = pickle.dumps({"t": _Call(REBUILD, *DAMAGED[name])})
    with pytest.raises(ValueError, match="tensor"):
        unpickle(data, "here")["t"]


def test_names_of_types_do_nothing_else() -> None:
    record = unpickle(pickle.dumps({"t": torch.float32, "x": 1}), "here")
    assert record["x"] == 1
    with pytest.raises(ValueError, match="neither tensor, array nor plain value"):
        record["t"]


@pytest.mark.parametrize("protocol", [2, 4])
def test_views_with_a_flag_have_their_sign(
    protocol: int, write_lmdb: Any, make_record: Any
) -> None:
    negative = torch._neg_view(torch.arange(18.0).reshape(6, 3))
    conjugate = torch.tensor([1 + 2j, 3j]).conj()
    fields = {"neg": negative, "conj": conjugate, "both": conjugate.imag}
    record = unpickle(pickle.dumps(fields, protocol=protocol), "here")
    for name, tensor in fields.items():
        assert torch.equal(record[name], tensor)
    dataset = open_dataset(write_lmdb({0: make_record(pos=negative)}))
    assert torch.equal(dataset.batch([0]).positions, dataset[0].positions)
    assert torch.equal(dataset[0].positions, negative.resolve_neg())


def test_other_flags_are_refused() -> None:
    storage, offset, size, stride, *_ = torch.arange(3.0).__reduce_ex__(4)[1]
    call = _Call(
        torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, {}, {"zero": True}
    )
    with pytest.raises(ValueError, match="flags"):
        unpickle(pickle.dumps({"t": call}), "here")
