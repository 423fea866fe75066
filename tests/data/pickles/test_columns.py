"""A batch is what its systems are one by one: numbers, errors and warnings."""

from __future__ import annotations

import pickle
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flt_mol.data.dataset import StructuresDataset
from flt_mol.data.options import ReadOptions
from flt_mol.data.pickles.columns import to_columns
from flt_mol.data.pickles.unpickling import raw_fields, unpickle
from flt_mol.structures import Structures
from tests.data.test_columns import equal


class Pickles(StructuresDataset):
    """Records in memory."""

    def __init__(self, pickles: Sequence[bytes], **options: Any) -> None:
        super().__init__("memory", ReadOptions(**options))
        self.pickles = list(pickles)

    def __len__(self) -> int:
        return len(self.pickles)

    def record(self, index: int) -> Any:
        return unpickle(self.pickles[index], self.where(index))

    def where(self, index: int) -> str:
        return f"memory, key {index}"

    def default_sid(self, index: int) -> int:
        return 1000 + index

    def _keep(self, indices: list[int]) -> None:
        self.pickles = [self.pickles[i] for i in indices]

    def _at_once(self, indices: Any) -> Structures | None:
        try:
            columns = to_columns(
                [raw_fields(self.pickles[i]) for i in indices],
                self.options,
                known=self.notes.seen,
                default_sid=lambda i: self.default_sid(indices[i]),
            )
        except Exception:
            return None
        return columns.structures(self.notes.seen)


def outcome(read: Any) -> tuple[Any, list[str]]:
    """What a reading gives, or says: batch or error, and warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = read()
        except ValueError as error:
            result = str(error)
    return result, [str(warning.message) for warning in caught]


def check(pickles: Sequence[bytes], indices: Sequence[int], **options: Any) -> bool:
    """Compare a batch with its systems one by one, twice; whether it was read at once at last."""
    fast, slow = Pickles(pickles, **options), Pickles(pickles, **options)
    for _ in range(2):
        one, ones = outcome(lambda: fast.batch(indices))
        many, manys = outcome(lambda: Structures.cat([slow[i] for i in indices]))
        assert ones == manys
        assert type(one) is type(many)
        assert one == many if isinstance(many, str) else equal(one, many)
    return fast._at_once([i % len(fast) for i in indices]) is not None


def _flat(x: Any) -> torch.Tensor:
    return torch.as_tensor(x).reshape(-1)


SPELLINGS = {
    "tensor": torch.as_tensor,
    "array": np.asarray,
    "list": lambda x: np.asarray(x).tolist(),
    "1.x tensor": lambda x: torch.as_tensor(x)[None],
    "column": lambda x: np.asarray(x)[:, None] if np.ndim(x) else x,
    "fortran": np.asfortranarray,
    "strided": lambda x: torch.stack([torch.as_tensor(x)] * 2, -1)[..., 1],
    "view": lambda x: torch.cat([_flat(x), torch.ones(9)])[:-9].view(np.shape(x)),
    "tail": lambda x: torch.cat([torch.ones(9), _flat(x)])[9:].view(np.shape(x)),
    "float64": lambda x: np.asarray(x, dtype=np.float64),
    "float32": lambda x: torch.as_tensor(x, dtype=torch.float32),
    "float16": lambda x: torch.as_tensor(x, dtype=torch.float16),
    "bfloat16": lambda x: torch.as_tensor(x, dtype=torch.bfloat16),
    "big-endian": lambda x: np.asarray(x).astype(">f4"),
    "bool": lambda x: np.asarray(x) > 0.5,
    "torch bool": lambda x: torch.as_tensor(x) > 0.5,
    "complex": lambda x: np.asarray(x) + 0j,
    "text": lambda x: str(np.asarray(x).tolist()),
    "none": lambda x: None,
    "empty": lambda x: torch.zeros(0, 3),
    "other": lambda x: {"a": 1},
    "scalar": lambda x: np.float64(1.5),
}
ODD = {
    "sid": [
        None,
        "text",
        np.int64(4),
        torch.tensor([7]),
        torch.tensor(3),
        2.0,
        1.5,
        b"ab",
        [5],
        {},
    ],
    "natoms": [None, 3, 3.0, np.int64(3), torch.tensor([3]), torch.tensor([3, 4]), "3", 4],
    "y_relaxed": [None, 1, np.float32(0.1), torch.tensor([0.5]), float("nan"), "x", [2.0], True],
    "y_init": [None, 0, torch.tensor(0.5), float("inf"), [1.0, 2.0], b"", -0.0],
    "bulk_index": [3, 2.5, "Pt", True, torch.tensor([3]), [1, 2], np.arange(3), np.zeros((2, 2))],
    "note": [b"x" * 300, {"a": [1]}, (1, 2), torch.zeros(65), "long " * 90, np.float64(0.5), {1}],
    "x": [torch.ones(3), {}, 5],
    7: [1],
}


def record(seed: int, sid: Any) -> dict[Any, Any]:
    """Three atoms."""
    rng = np.random.default_rng(seed)
    return {
        "pos": torch.tensor(rng.normal(size=(3, 3)), dtype=torch.float32),
        "pos_relaxed": torch.tensor(rng.normal(size=(3, 3)), dtype=torch.float32),
        "cell": torch.tensor(np.diag([8.0, 9.0, 20.0]), dtype=torch.float32),
        "atomic_numbers": torch.tensor([78.0, 6.0, 8.0]),
        "tags": torch.tensor([1, 2, 2]),
        "fixed": torch.tensor([1.0, 0.0, 0.0]),
        "natoms": 3,
        "sid": sid,
        "y_init": 1.5,
        "y_relaxed": rng.normal(),
        "edge_index": torch.arange(400).reshape(2, 200),
    }


ARRAYS = ["pos", "pos_relaxed", "cell", "atomic_numbers", "tags", "fixed", "pbc"]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"require_energy": True},
    {"ignore_energy": True},
    {"energy": "y_init", "energy_initial": "y_relaxed", "positions_relaxed": "pos"},
    {"energy": "bulk_index"},
]


@st.composite
def _pickles(draw: st.DrawFn) -> list[bytes]:
    records = [record(draw(st.integers(0, 99)), sid) for sid in range(draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        for each in records:
            each["pbc"] = torch.tensor([True, True, draw(st.booleans())])
    for name in draw(st.sets(st.sampled_from([*ARRAYS, "natoms", "sid", "y_relaxed"]), max_size=2)):
        for each in records:
            each.pop(name, None)
    for name in draw(st.lists(st.sampled_from(ARRAYS), max_size=3)):
        spelling = SPELLINGS[draw(st.sampled_from(sorted(SPELLINGS)))]
        for each in records if draw(st.booleans()) else records[:1]:
            if isinstance(each.get(name), torch.Tensor) and each[name].dtype != torch.bfloat16:
                each[name] = spelling(each[name])
    for name in draw(st.lists(st.sampled_from(list(ODD)), max_size=3)):
        for each in records if draw(st.booleans()) else records[:1]:
            each[name] = draw(st.sampled_from(ODD[name]))
    protocol = draw(st.integers(2, 5))
    return [pickle.dumps(each, protocol) for each in records]


@settings(max_examples=400, deadline=None)
@given(
    _pickles(),
    st.lists(st.integers(-1, 0), min_size=1, max_size=3),
    st.sampled_from(OPTIONS),
)
def test_a_batch_is_what_its_systems_are(
    pickles: list[bytes], indices: list[int], options: dict[str, Any]
) -> None:
    check(pickles, indices, **options)


@pytest.mark.parametrize("field", ARRAYS[:-1])
@pytest.mark.parametrize("spelling", list(SPELLINGS))
def test_spellings_of_one_field(field: str, spelling: str) -> None:
    records = [record(seed, seed) for seed in range(3)]
    for each in records[1:]:
        each[field] = SPELLINGS[spelling](each[field])
    check([pickle.dumps(each) for each in records], [2, 0, 1])


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in ODD.items() for value in values]
)
def test_odd_values(field: Any, value: Any) -> None:
    records = [record(seed, seed) for seed in range(2)]
    records[1][field] = value
    check([pickle.dumps(each) for each in records], [1, 0])


@pytest.mark.parametrize(
    "spelling",
    ["tensor", "array", "1.x tensor", "float64", "float32", "view", "tail", "list", "strided"],
)
@pytest.mark.parametrize("protocol", range(6))
def test_common_spellings_are_read_at_once(spelling: str, protocol: int) -> None:
    records = [record(seed, seed) for seed in range(3)]
    for each in records:
        for field in ARRAYS[:-1]:
            each[field] = SPELLINGS[spelling](each[field])
    pickles = [pickle.dumps(each, protocol) for each in records]
    assert check(pickles, [0, 2, 2, 1, -1])
    assert check([zlib.compress(data) for data in pickles], [0, 1])


@pytest.mark.parametrize("version", [1, 2])
def test_pyg_records_are_read_at_once(version: int, pickle_pyg: Any) -> None:
    pickles = [pickle_pyg(record(seed, seed) | {"x": None}, version) for seed in range(3)]
    assert check(pickles, [0, 2, 1])


@pytest.mark.parametrize("field", ["tags", "fixed", "natoms", "sid", "cell"])
@pytest.mark.filterwarnings("ignore:memory. no")
def test_what_is_missing_slows_the_first_batch_only(field: str) -> None:
    records = [record(seed, seed) for seed in range(3)]
    for each in records:
        del each[field]
    dataset = Pickles([pickle.dumps(each) for each in records])
    assert dataset._at_once([0, 1]) is None
    dataset.batch([0])
    assert dataset._at_once([0, 1]) is not None
    assert check(dataset.pickles, [0, 1, 2])


def test_targets_that_are_missing() -> None:
    records = [record(seed, seed) for seed in range(3)]
    del records[1]["y_relaxed"], records[1]["pos_relaxed"]
    pickles = [pickle.dumps(each) for each in records]
    assert check(pickles, [1, 1])
    assert not check(pickles, [0, 1])
    assert not check(pickles, [1], require_energy=True)
    assert check(pickles, [0, 1], ignore_energy=True)
    assert check(pickles, [0, 1, 2], energy="y_init", positions_relaxed="pos")
    assert not check(pickles, [1, 0], energy="y")
    assert not check(pickles, [1, 0], energy_initial="y", require_energy=False)


def test_further_values_come_with_the_batch() -> None:
    values = [{"bulk_index": 3, "name": "Pt"}, {"ads": [1, 2], "bulk_index": torch.tensor([4])}]
    pickles = [pickle.dumps(record(i, i) | value) for i, value in enumerate(values)]
    assert check(pickles, [0, 1])
    batch = Pickles(pickles).batch([1, 0])
    assert batch.info == {"ads": ([1, 2], None), "bulk_index": (4, 3), "name": (None, "Pt")}


@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_bad_record_is_named(position: int) -> None:
    records = [record(seed, seed) for seed in range(3)]
    records[position]["pos"][1, 1] = float("nan")
    pickles = [pickle.dumps(each) for each in records]
    message = f"memory, key {position}, sid {position}: pos of atom 1 is not finite"
    with pytest.raises(ValueError, match=message):
        Pickles(pickles).batch([0, 1, 2])
    pickles[position] = pickles[position][:-20]
    with pytest.raises(ValueError, match=f"memory, key {position}: damaged record"):
        Pickles(pickles).batch([0, 1, 2])


def test_indices_outside_and_no_indices() -> None:
    dataset = Pickles([pickle.dumps(record(0, 0))])
    for indices in ([1], [0, -2]):
        with pytest.raises(IndexError, match="of 1 in memory"):
            dataset.batch(indices)
    with pytest.raises(ValueError, match="at least one"):
        dataset.batch([])
    assert equal(dataset.batch(torch.tensor([0, -1])), dataset.batch([0, 0]))


def test_sizes_without_structures() -> None:
    records = [record(seed, seed) for seed in range(3)]
    records[1]["atomic_numbers"] = [[6, 6]]
    dataset = Pickles([pickle.dumps(each) for each in records])
    assert dataset.natoms().tolist() == [3, 2, 3]
    assert dataset.natoms().dtype == np.int64
    dataset = Pickles([pickle.dumps({"sid": 4})])
    with pytest.raises(ValueError, match="memory, key 0: atomic_numbers is missing"):
        dataset.natoms()
