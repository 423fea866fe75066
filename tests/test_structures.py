import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flt_mol import Structures
from flt_mol.functional import neighbor_pairs
from flt_mol.structures import relaxed_displacement


def make(n, sid=0, **fields):
    generator = torch.Generator().manual_seed(n)
    return Structures.single(
        torch.randint(1, 119, (n,), generator=generator),
        torch.randn(n, 3, generator=generator, dtype=torch.float32),
        sid=sid,
        **fields,
    )


def test_forces_go_with_their_atoms_until_those_move():
    first, second = (make(n, sid=n, forces=torch.full((n, 3), float(n))) for n in (2, 3))
    batch = Structures.cat([first, second])
    assert batch.select([1, 0]).forces[:, 0].tolist() == [3, 3, 3, 2, 2]
    assert torch.equal(batch[0].forces, first.forces)
    assert batch.to("meta").forces.device.type == "meta"
    assert batch.moved(batch.positions + 1).forces is None
    assert Structures.cat([first, make(3)]).forces is None
    with pytest.raises(ValueError, match="forces"):
        replace(first, forces=torch.zeros(3, 3))


def test_defaults_are_an_open_molecule():
    water = Structures.single([8, 1, 1], [[0, 0, 0], [1, 0, 0], [0, 1, 0]], sid="water")
    assert water.sid == ("water",)
    assert not water.pbc.any()
    assert not water.cell.any()
    assert water.tags.tolist() == [0, 0, 0]
    assert water.fixed.tolist() == [False] * 3
    assert water.energy is None
    assert water.positions.dtype == torch.float32


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
@settings(deadline=None)
def test_cat_then_index_gives_each_system_back(sizes):
    parts = [make(n, sid=f"s{i}", energy=float(i)) for i, n in enumerate(sizes)]
    batch = Structures.cat(parts)
    assert len(batch) == len(sizes)
    assert batch.natoms.tolist() == sizes
    assert batch.system.tolist() == [b for b, n in enumerate(sizes) for _ in range(n)]
    for part, again in zip(parts, batch, strict=True):
        assert torch.equal(part.positions, again.positions)
        assert torch.equal(part.atomic_numbers, again.atomic_numbers)
        assert part.sid == again.sid
        assert again.energy is not None
        assert part.energy.tolist() == again.energy.tolist()


def test_optional_fields_need_every_part_and_info_keeps_every_name():
    with_energy = make(2, energy=1.0, info={"facet": "111", "bulk_index": 3})
    without = make(3)
    batch = Structures.cat([with_energy, without])
    assert batch.energy is None
    assert batch.info == {"facet": ("111", None), "bulk_index": (3, None)}
    assert Structures.cat([with_energy, with_energy]).info["bulk_index"] == (3, 3)


def test_energies_keep_all_digits_of_a_python_float():
    assert make(1, energy=-0.4019095003604889).energy.item() == -0.4019095003604889


def test_dtypes_do_not_follow_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        single = Structures.single([1], [[0.0, 0.0, 0.0]])
        assert single.positions.dtype == torch.float32
        assert single.cell.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("index", [2, -3])
def test_index_out_of_range(index):
    with pytest.raises(IndexError, match="of 2"):
        Structures.cat([make(1), make(2)])[index]


def test_wrong_shapes_name_the_field():
    water = make(3)
    with pytest.raises(ValueError, match=r"cell has shape \(2, 3, 3\)"):
        Structures(**{**vars(water), "cell": torch.zeros(2, 3, 3)})
    with pytest.raises(ValueError, match="sid .*expected 1 names"):
        Structures(**{**vars(water), "sid": (1, 2)})


@pytest.mark.parametrize("number", [0, 119, -1])
def test_no_element_of_that_number(number):
    with pytest.raises(ValueError, match=f"{number}.*1 to 118"):
        Structures.single([number], [[0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"positions": torch.arange(12.0).reshape(3, 4)}, r"positions of s has shape \(3, 4\)"),
        ({"positions": torch.zeros(5, 3)}, r"positions of s has shape \(5, 3\), expected \(4, 3\)"),
        (
            {"positions": [[0.0, 0, float("nan")]] * 4},
            "positions of s holds nan, expected a finite number",
        ),
        ({"atomic_numbers": [1, 1, 1, 8.7]}, "atomic_numbers of s holds 8.7"),
        ({"tags": [0, 1, 2, 5]}, "tags of s holds 5, expected 0 to 2"),
        ({"tags": [0, 1, 2, -1]}, "tags of s holds -1"),
        ({"tags": [0, 1]}, r"tags of s has shape \(2,\), expected \(4,\)"),
        ({"cell": torch.zeros(3, 2)}, r"cell of s has shape \(3, 2\)"),
        ({"cell": torch.full((3, 3), float("inf"))}, "cell of s holds inf, expected a finite"),
        ({"pbc": [True, False]}, r"pbc of s has shape \(2,\), expected \(1, 3\)"),
    ],
)
def test_fields_that_make_no_sense(fields, message):
    good = {"atomic_numbers": [1, 1, 1, 1], "positions": torch.zeros(4, 3), "sid": "s"}
    with pytest.raises(ValueError, match=message):
        Structures.single(**{**good, **fields})


def test_axes_of_length_one_do_not_matter():
    single = Structures.single(
        torch.tensor([[1.0], [8.0]]),
        torch.arange(6.0).reshape(1, 2, 3),
        cell=torch.eye(3),
        pbc=[[True, True, False]],
        tags=torch.tensor([[0, 2]]),
    )
    assert single.atomic_numbers.tolist() == [1, 8]
    assert single.positions.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert single.pbc.tolist() == [[True, True, False]]
    assert single.tags.tolist() == [0, 2]
    assert Structures.single([1], [0.0, 1.0, 2.0]).positions.tolist() == [[0, 1, 2]]
    assert len(Structures.single([], [])) == 1


def test_cat_of_nothing():
    with pytest.raises(ValueError, match="at least one"):
        Structures.cat([])


def test_to_moves_every_tensor():
    batch = make(2, energy=1.0, positions_relaxed=torch.zeros(2, 3)).to("meta")
    assert batch.positions.device.type == "meta"
    assert batch.energy.device.type == "meta"
    assert batch.positions_relaxed.device.type == "meta"


def same_pairs(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.sampled_from([0.5, 1.5, 4.0]))
@settings(deadline=None)
def test_pairs_of_a_batch_are_those_of_its_systems(sizes, cutoff):
    cell = 3.0 * torch.eye(3)
    parts = [make(n, cell=cell, pbc=[True, True, False]).with_pairs(cutoff) for n in sizes]
    batch = Structures.cat(parts)
    assert batch.cutoff == cutoff
    found = neighbor_pairs(batch.positions, batch.cell, batch.pbc, batch.ptr, cutoff)
    assert same_pairs(batch.pairs, found)
    for part, again in zip(parts, batch, strict=True):
        assert same_pairs(part.pairs, again.pairs)
        assert again.cutoff == cutoff


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.data())
@settings(deadline=None)
def test_selected_systems_are_those_of_their_places(sizes, data):
    parts = [
        make(n, sid=i, energy=-float(i), info={"place": i}, cell=3.0 * torch.eye(3), pbc=True)
        for i, n in enumerate(sizes)
    ]
    parts = [part.with_pairs(2.0) for part in parts]
    rows = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=6))
    found = Structures.cat(parts).select(rows)
    expected = Structures.cat([parts[row] for row in rows])
    assert found.sid == expected.sid == tuple(rows)
    assert found.info == {"place": tuple(rows)}
    for name in ("atomic_numbers", "positions", "cell", "pbc", "energy", "ptr", "system"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert same_pairs(found.pairs, expected.pairs)


def test_pairs_stay_only_where_every_part_has_them_within_one_cutoff():
    near, far, without = make(3).with_pairs(1.0), make(3).with_pairs(2.0), make(3)
    for parts in ([near, far], [near, without], [without, near]):
        batch = Structures.cat(parts)
        assert batch.pairs is None
        assert batch.cutoff is None


def test_pairs_are_moved_along():
    batch = make(4).with_pairs(3.0).to("meta")
    assert {x.device.type for x in batch.pairs} == {"meta"}
    assert batch.cutoff == 3.0


def test_pairs_come_with_their_cutoff():
    batch = make(2).with_pairs(9.0)
    for change in ({"cutoff": None}, {"pairs": None}):
        with pytest.raises(ValueError, match="pairs or cutoff alone"):
            replace(batch, **change)


def test_pairs_that_cannot_be_made_name_the_system():
    flat = make(2, sid="flat", cell=torch.diag(torch.tensor([3.0, 3.0, 0.0])), pbc=True)
    with pytest.raises(ValueError, match="^sid flat: .*cell"):
        Structures.cat([make(2), flat]).with_pairs(3.0)
    with pytest.raises(ValueError, match="^cutoff is -1"):
        make(2).with_pairs(-1.0)


def test_a_batch_without_pairs_does_not_load_their_module():
    code = "import flt_mol, sys; sys.exit('flt_mol.functional' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


KINDS_OF_FIELDS = {
    "atomic_numbers": ([torch.uint8, torch.int16, torch.bool, torch.float32], "int64"),
    "tags": ([torch.uint8, torch.int8, torch.bool, torch.float64], "int64"),
    "ptr": ([torch.uint8, torch.int16, torch.float32], "int64"),
    "fixed": ([torch.uint8, torch.int64, torch.float32], "bool"),
    "pbc": ([torch.uint8, torch.int64, torch.float32], "bool"),
    "positions": ([torch.int64, torch.bool, torch.complex64], "a float"),
    "cell": ([torch.int64, torch.int32], "a float"),
    "positions_relaxed": ([torch.int64], "a float"),
    "energy": ([torch.int64], "a float"),
    "energy_initial": ([torch.int64], "a float"),
}
PAIR = Structures.single(
    [1, 1],
    [[0, 0, 0], [0, 0, 2]],
    energy=1.0,
    energy_initial=2.0,
    positions_relaxed=[[0, 0, 0], [0, 0, 1]],
)


@pytest.mark.parametrize("name", KINDS_OF_FIELDS)
def test_fields_of_another_kind(name):
    dtypes, expected = KINDS_OF_FIELDS[name]
    for dtype in dtypes:
        message = f"^Structures.{name} has dtype {dtype}, expected {expected}"
        with pytest.raises(ValueError, match=message):
            replace(PAIR, **{name: getattr(PAIR, name).to(dtype)})
    for value, kind in (([1, 2], "list"), (np.zeros(2), "ndarray"), ("x", "str")):
        with pytest.raises(
            ValueError, match=f"^Structures.{name} is a {kind}, expected a tensor; "
        ):
            replace(PAIR, **{name: value})
    # Optional are those alone that may be unknown.
    if name in ("positions_relaxed", "energy", "energy_initial"):
        assert getattr(replace(PAIR, **{name: None}), name) is None
    else:
        with pytest.raises(ValueError, match=f"^Structures.{name} is a NoneType"):
            replace(PAIR, **{name: None})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_kinds_that_will_do(dtype):
    names = ("positions", "cell", "positions_relaxed", "energy", "energy_initial")
    replace(PAIR, **{name: getattr(PAIR, name).to(dtype) for name in names})
    names = ("atomic_numbers", "tags", "ptr")
    replace(PAIR, **{name: getattr(PAIR, name).int() for name in names})


def test_a_text_is_no_list_of_names():
    batch = Structures.cat([PAIR, PAIR])
    with pytest.raises(ValueError, match="^Structures.sid is 'ab', expected 2 names"):
        replace(batch, sid="ab")


def wrapped(sids=("a-1", "a-2", 77)):
    """Systems whose atoms move by up to 0.3 Å, wrapped by up to two lattice vectors, and how."""
    generator = torch.Generator().manual_seed(0)
    cell = torch.tensor([[4.0, 0.5, 0.25], [0.0, 5.0, 1.0], [0.0, 0.0, 6.0]])
    parts, moves = [], []
    for sid in sids:
        n = 5
        position = 4 * torch.rand(n, 3, generator=generator)
        move = 0.6 * torch.rand(n, 3, generator=generator) - 0.3
        shift = torch.randint(-2, 3, (n, 3), generator=generator).float() * torch.tensor([1, 1, 0])
        relaxed = position + move + shift @ cell
        fixed = [1, 0, 0, 1, 0]
        pbc = [True, True, False]
        parts.append(
            Structures.single(
                [1] * n,
                position,
                cell=cell,
                pbc=pbc,
                sid=sid,
                fixed=fixed,
                positions_relaxed=relaxed,
            )
        )
        moves.append(move.masked_fill(torch.tensor(fixed).bool()[:, None], 0.0))
    return Structures.cat(parts), torch.cat(moves)


def test_displacements_are_the_minimum_image_of_free_atoms():
    structures, moves = wrapped()
    assert (structures.positions_relaxed - structures.positions).norm(dim=-1).max() > 3
    found = relaxed_displacement(structures)
    torch.testing.assert_close(found, moves, rtol=0, atol=1e-5)
    assert found.dtype == torch.float32
    assert not found[structures.fixed].any()
    alone = torch.cat([relaxed_displacement(system) for system in structures])
    assert torch.equal(found, alone)


def test_open_axes_are_not_wrapped():
    far = Structures.single(
        [1],
        [[0.0, 0, 0]],
        cell=3 * torch.eye(3),
        pbc=[True, False, False],
        positions_relaxed=[[2.5, 2.5, 0.0]],
    )
    assert relaxed_displacement(far).tolist() == [[-0.5, 2.5, 0.0]]


def test_systems_without_sound_displacements_are_named():
    structures, _ = wrapped()
    with pytest.raises(ValueError, match="sids a-1, .* no positions_relaxed"):
        relaxed_displacement(replace(structures, positions_relaxed=None))
    relaxed, cell = structures.positions_relaxed.clone(), structures.cell.clone()
    relaxed[-1, 0] = torch.nan
    with pytest.raises(ValueError, match="sid 77: .*finite"):
        relaxed_displacement(replace(structures, positions_relaxed=relaxed))
    cell[1, 1] = 0.0
    with pytest.raises(ValueError, match="sid a-2: .*singular"):
        relaxed_displacement(replace(structures, cell=cell))
