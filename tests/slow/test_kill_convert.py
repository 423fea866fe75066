"""Conversions killed (SIGKILL) at random moments leave no half file, and run again whole."""

import os
import random

import pytest

from flt_mol.data import convert, open_dataset
from helpers.killing import run
from helpers.systems import make_record, same, write_records

pytestmark = pytest.mark.slow
KILLS = {".safetensors": 8, ".aselmdb": 6, ".extxyz": 6}


def work(source, output):
    convert(open_dataset(source), output)


@pytest.mark.filterwarnings("ignore:atoms less than")  # random positions
@pytest.mark.parametrize("suffix", KILLS)
def test_no_half_file(suffix, tmp_path):
    count = 600 if suffix == ".safetensors" else 150
    records = [make_record(i, 60, graph=suffix == ".safetensors") for i in range(count)]
    source = write_records(tmp_path / "source.lmdb", records)
    whole = tmp_path / f"whole{suffix}"
    run(work, source, whole)
    seconds = run(work, source, tmp_path / f"again{suffix}")
    wanted = open_dataset(whole)
    output = tmp_path / f"killed{suffix}"
    draw, killed = random.Random(1), 0
    while killed < KILLS[suffix]:
        output.unlink(missing_ok=True)
        needed = run(work, source, output, limit=draw.uniform(0, seconds))
        if needed is None:
            killed += 1
            assert not output.exists() or output.read_bytes() == whole.read_bytes()
        else:  # the machine was busier before
            seconds = min(seconds, needed)
    output.unlink(missing_ok=True)
    convert(open_dataset(source), output)
    rows = range(0, count, 7)
    assert same(open_dataset(output).batch(rows), wanted.batch(rows))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".killed")]
