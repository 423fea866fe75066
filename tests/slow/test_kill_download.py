"""Downloads killed (SIGKILL) at random moments; the next run makes the same files."""

import hashlib
import io
import random
import shutil
import tarfile
from pathlib import Path

import pytest
import yaml

from flt_mol.data.remote import download
from helpers.flaky_server import FlakyServer, Reply, serving
from helpers.killing import run

pytestmark = pytest.mark.slow
KILLS = 8
SPLITS = ("train", "val_id", "val_ood_ads", "test_id")
SIZE = 1 << 21


def work(folder, url, to):
    download(Path(folder), to=to, base_url=url)


def publish(folder, draw):
    """A recipe of some splits, which are not opened here, and their archive."""
    splits, stream = {}, io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as tar:
        for split in SPLITS:
            data = draw.randbytes(SIZE // 4) * 4
            info = tarfile.TarInfo(f"set/all/{split}/data.lmdb")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
            digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
            splits[split] = {"file": info.name, "bytes": len(data), "md5": digest}
    packed = stream.getvalue()
    digest = hashlib.md5(packed, usedforsecurity=False).hexdigest()
    archive = {"url": "http://127.0.0.1/set.tar.gz", "bytes": len(packed), "md5": digest}
    folder.mkdir()
    content = {"name": "set", "archive": archive, "splits": splits}
    (folder / "dataset.yaml").write_text(yaml.safe_dump(content))
    return packed


def contents(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_same_files(tmp_path):
    draw = random.Random(0)
    packed = publish(tmp_path / "recipe", draw)

    def cuts():
        while True:
            yield Reply(drop_after=draw.randrange(1, len(packed)))

    with serving(FlakyServer({"set.tar.gz": packed}, cuts(), rate=1.5e7)) as server:
        run(work, tmp_path / "recipe", server.url, tmp_path / "warm")
        seconds = run(work, tmp_path / "recipe", server.url, tmp_path / "whole")
        wanted, killed = contents(tmp_path / "whole"), 0
        while killed < KILLS:
            to = tmp_path / f"{killed} {seconds}"
            shutil.rmtree(to, ignore_errors=True)
            limit = draw.uniform(0, seconds)
            needed = run(work, tmp_path / "recipe", server.url, to, limit=limit)
            if needed is not None:  # the machine was busier before
                seconds = min(seconds, needed)
                continue
            killed += 1
            for path in to.rglob("data.lmdb"):
                assert path.stat().st_size == SIZE
            run(work, tmp_path / "recipe", server.url, to)
            assert {name for name in contents(to) if ".lock" not in name} == set(wanted)
            assert contents(to).items() >= wanted.items()
