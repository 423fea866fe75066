"""Which systems a checkpoint says were trained on and held out."""

from dataclasses import replace

import pytest
import torch

from flt_mol import Structures
from flt_mol.data import open_dataset
from flt_mol.training.seen import (
    SystemsSeen,
    TrainedFile,
    find_held_out,
    fingerprints,
    read_systems,
    systems_seen,
)


def system(height=2.0, sid="a", **given):
    cell = given.pop("cell", [[3, 0, 0], [0, 3, 0], [0, 0, 9]])
    return Structures.single(
        given.pop("numbers", [29, 8]), [[0, 0, 0], [0, 0, height]], cell=cell, sid=sid, **given
    )


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (system(sid="b", energy=-1.0, tags=[1, 2]), True),
        (system(2.0000001), True),
        (system(-0.0), False),
        (system(2.01), False),
        (system(numbers=[29, 7]), False),
        (system(cell=[[3, 0, 0], [0, 3, 0], [0, 0, 9.1]]), False),
        (system(cell=None), False),
    ],
)
def test_the_same_atoms_are_the_same_system(other, same):
    together = Structures.cat([system(sid="z", numbers=[1, 1]), other, system()])
    of_other, of_one = fingerprints(together)[1:]
    assert (of_other == of_one) == same
    assert fingerprints(system())[0] == of_one, "whatever is beside it in the batch"


def test_no_sign_of_zero():
    assert fingerprints(system(0.0)) == fingerprints(system(-0.0))


def test_a_checkpoint_gives_back_what_it_was_given(tmp_path):
    training, held_out = [system(h, f"t{h}") for h in (1, 2, 3)], [system(4, 7), system(5, "b")]
    torch.save({"systems": systems_seen(training, held_out)}, tmp_path / "a.ckpt")
    seen = read_systems(torch.load(tmp_path / "a.ckpt", weights_only=True))
    assert seen.trained_on == {fingerprints(one)[0] for one in training}
    assert seen.held_out == {
        ("7", fingerprints(held_out[0])[0]),
        ("b", fingerprints(held_out[1])[0]),
    }


def test_what_the_starting_checkpoint_was_trained_on_counts():
    first = read_systems({"systems": systems_seen([system(1), system(2)], None)})
    second = read_systems({"systems": systems_seen([system(2), system(3)], [system(1)], first)})
    assert second.trained_on == {fingerprints(system(h))[0] for h in (1, 2, 3)}
    third = systems_seen([system(3)], None, SystemsSeen())
    assert third["trained_on"].tolist() == fingerprints(system(3))


def test_of_a_large_data_set_only_what_was_held_out_is_noted():
    class Large:
        def __len__(self):
            raise AssertionError("it would be read once more")

    assert systems_seen(Large(), [system()])["trained_on"] is None
    assert systems_seen([system()], None)["held_out"] is None


def test_trainings_known_by_their_file_alone_are_handed_on(tmp_path):
    data = {"name": "mine", "train": "t", "paths": {"t": "/t.lmdb", "v": "/v.lmdb"}, "energy": "y"}
    theirs = TrainedFile({"name": None, "train": "train", "paths": {"train": "/base.lmdb"}})
    before = SystemsSeen(frozenset([5]), files=(theirs,))
    content = {"systems": systems_seen(object(), [system(4)], before, data)}
    torch.save(content, tmp_path / "a.ckpt")
    seen = read_systems(torch.load(tmp_path / "a.ckpt", weights_only=True))
    (held,) = fingerprints(system(4))
    own = TrainedFile({"name": "mine", "train": "t", "paths": {"t": "/t.lmdb"}}, frozenset([held]))
    assert (seen.trained_on, seen.files) == ({5}, (theirs, own))
    tuned = read_systems({"systems": systems_seen([system(1)], None, seen)})
    assert tuned == SystemsSeen(seen.trained_on | set(fingerprints(system(1))), files=seen.files)


def test_checkpoints_that_do_not_tell_stand_for_their_file():
    data = {"name": None, "train": "train", "paths": {"train": "/a.lmdb"}}
    seen = read_systems({"config": {"data": data}})
    assert seen == SystemsSeen(files=(TrainedFile(data),))
    unknown = read_systems({"systems": systems_seen([system(1)], None, SystemsSeen())})
    assert unknown.was_trained_on(fingerprints(system(1))[0]) is True
    assert unknown.was_trained_on(fingerprints(system(2))[0]) is None


def test_what_is_known_of_a_system():
    held, other, known = 1, 2, 3
    file = TrainedFile({}, frozenset([held]))
    assert SystemsSeen().was_trained_on(other) is None
    assert SystemsSeen(frozenset([known])).was_trained_on(known) is True
    assert SystemsSeen(frozenset([known])).was_trained_on(other) is False
    seen = SystemsSeen(frozenset([known]), files=(file,))
    assert [seen.was_trained_on(n) for n in (held, other, known)] == [False, None, True]
    assert [seen.was_trained_on(n, [file]) for n in (held, other, known)] == [False, True, True]


def test_held_out_systems_are_found_by_what_they_are():
    """Of equals those of the name, else the first, and no more than were held out."""
    (a,), (b,), (c,) = (fingerprints(system(h)) for h in (1, 2, 3))
    given = [(1, "x"), (2, "o1"), (2, "held"), (2, "o2"), (1, "y")]
    source = open_dataset([system(h, sid, energy=0.0, tags=[1, 2]) for h, sid in given])
    assert find_held_out(source, [("held", b)]) == ([2], [])
    assert find_held_out(source, [("other", b), ("held", b)]) == ([1, 2], [])
    assert find_held_out(source, [("other", a)]) == ([0], [])
    assert find_held_out(source, [("z", c), ("x", a), ("q", a), ("r", a)]) == (
        [0, 4],
        [("q", a), ("z", c)],
    )


def test_systems_of_any_number():
    many = [replace(system(), sid=(i,)) for i in range(300)]
    assert systems_seen([], many)["held_out"]["sid"] == [str(i) for i in range(300)]


@pytest.mark.parametrize(
    "systems",
    [
        None,
        3,
        {"trained_on": [1], "held_out": 3},
        {"trained_on": torch.ones(2), "held_out": {"sid": ["a"], "fingerprint": torch.ones(2, 1)}},
        {"held_out": {"sid": ["a"], "fingerprint": torch.tensor([1, 2])}},
    ],
)
def test_what_others_wrote_there_is_passed_over(systems):
    assert read_systems({"systems": systems}) == SystemsSeen()
