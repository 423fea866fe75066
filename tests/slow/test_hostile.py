"""Damaged and hostile records: nothing runs, hangs, dies, or takes much memory."""

import json
import os
import pickle
import resource
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from random import Random

import pytest

from tests.helpers.hostile import PICKLES, record

pytestmark = pytest.mark.slow

RECORDS, HOSTILE = 1000, 200
SECONDS = 10  # of the processor, for one record
MEMORY = 3 << 30  # bytes of address space of the process that reads
GROWTH = 1 << 20  # kB of memory that one small record may take


def flipped(data, rng):
    """One to eight bits flipped."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(data, rng):
    return data[: rng.randrange(len(data))]


def overwritten(data, rng):
    at, size = rng.randrange(len(data)), rng.choice((1, 2, 4, 16, 64))
    return (data[:at] + rng.randbytes(size) + data[at + size :])[: len(data)]


def resized(data, rng):
    """What could be a size or a memo index set to a number at the edge."""
    size = rng.choice((1, 2, 4, 8))
    at = rng.randrange(len(data))
    number = rng.choice((0, 1, 0x7F, 0xFF, 0xFFFF, (1 << 31) - 1, (1 << 32) - 1, (1 << 64) - 1))
    return data[:at] + (number % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]


def repeated(data, rng):
    """A part over another one, or in between."""
    a, b, size = rng.randrange(len(data)), rng.randrange(len(data)), rng.choice((1, 8, 64, 512))
    return data[:b] + data[a : a + size] + data[b + rng.choice((0, size)) :]


def spliced(data, rng):
    """A hostile pickle put in somewhere."""
    other = rng.choice(list(PICKLES.values()))("canary")[:100_000]
    at = rng.randrange(len(data))
    return data[:at] + other[2 if other[:1] == b"\x80" else 0 : -1] + data[at:]


MUTATIONS = (flipped, cut, overwritten, resized, repeated, spliced)


def sound_records(pickle_pyg):
    plain = record()
    arrays = {k: v.numpy() if hasattr(v, "numpy") else v for k, v in plain.items()}
    row = {
        "numbers": {"__ndarray__": [[4], "int64", [29, 29, 6, 8]]},
        "positions": {"__ndarray__": [[4, 3], "float64", [0.5 * i for i in range(12)]]},
        "cell": {"__ndarray__": [[3, 3], "float64", [5.0, 0, 0, 0, 5, 0, 0, 0, 20]]},
        "pbc": {"__ndarray__": [[3], "bool", [True, True, False]]},
        "constraints": [{"name": "FixAtoms", "kwargs": {"indices": [0, 1]}}],
        "key_value_pairs": {"sid": 7},
        "data": {"y_relaxed": -1.5},
    }
    return [
        pickle_pyg(plain, 1),
        pickle_pyg(plain, 2),
        pickle_pyg(plain, 1, 0),
        pickle.dumps(plain, 2),
        pickle.dumps(arrays, 5),
        json.dumps(row).encode(),
    ]


def read_all(folder, write_lmdb, values):
    """Have another process read the records; its answer, one line for each."""
    path = write_lmdb(dict(enumerate(values)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command = [sys.executable, "-X", "faulthandler", __file__, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"after {len(lines)} records: {done.stderr[-500:]}"
    return [json.loads(line) for line in lines]


def mutated(pickle_pyg):
    rng = Random(0)
    sound = sound_records(pickle_pyg)
    for _ in range(RECORDS):
        data = rng.choice(sound)
        for _ in range(rng.choice((1, 1, 1, 3))):
            data = rng.choice(MUTATIONS)(data, rng) or b"\0"
        yield zlib.compress(data) if rng.random() < 0.3 else data


def hostile(canary):
    """Each hostile pickle as it is, compressed, and as a field of a record; some more than once."""
    rng = Random(1)
    for make in (*PICKLES.values(),):
        data = make(canary)
        yield data
        yield zlib.compress(data)
    while True:
        data = rng.choice(list(PICKLES.values()))(canary)
        yield rng.choice(MUTATIONS[:5])(data, rng) or b"\0"


@pytest.mark.parametrize("kind", ["mutated", "hostile"])
def test_no_record_does_harm(kind, tmp_path, write_lmdb, pickle_pyg):
    canary = tmp_path / "canary"
    if kind == "mutated":
        values = list(mutated(pickle_pyg))
    else:
        values = [value for value, _ in zip(hostile(str(canary)), range(HOSTILE), strict=False)]
    folder = tmp_path / "empty"
    folder.mkdir()
    answers = read_all(folder, write_lmdb, values)
    assert len(answers) == len(values)
    faults = [(i, answer) for i, answer in enumerate(answers) if answer["fault"]]
    assert faults == []
    assert not canary.exists()
    assert not list(folder.iterdir())
    refused = sum(answer["refused"] for answer in answers)
    assert refused > len(values) / 3


def _examine(dataset, index, seen):
    seen.clear()
    before = resource.getrusage(resource.RUSAGE_SELF)
    used = int(before.ru_utime + before.ru_stime)
    limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (used + SECONDS, limit))  # then the process ends
    answer = {"refused": False, "fault": ""}
    for read in (lambda: dataset[index], lambda: dataset.record(index)):
        try:
            read()
        except ValueError as error:
            answer["refused"] = True
            if "data.lmdb, key" not in str(error):
                answer["fault"] = f"does not name the record: {error!r:.200}"
        except BaseException as error:
            answer["fault"] = f"{type(error).__name__}: {error!s:.200}"
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss
    if seen:
        answer["fault"] = f"ran: {seen[0]}"
    elif growth > GROWTH:
        answer["fault"] = f"took {growth >> 10} MB"
    return answer


def main(path):
    """The process that reads: with little memory, under a hook that notes what is forbidden."""
    from flt_mol.data import LmdbDataset

    warnings.simplefilter("ignore")
    dataset = LmdbDataset(path)
    seen = []
    forbidden = ("os.", "subprocess.", "socket.", "shutil.", "pty.", "pickle.find_class", "ctypes.")

    def hook(event, args):
        writes = (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if writes or (event.startswith(forbidden) and event not in ("os.scandir", "os.listdir")):
            seen.append(f"{event} {args!r:.100}")

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(hook)
    for index in range(len(dataset)):
        print(json.dumps(_examine(dataset, index, seen)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
