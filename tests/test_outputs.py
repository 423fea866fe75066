"""Places to write to, asked before the work."""

import os
from pathlib import Path

import pytest
from slabs import platinum

from flt_mol.cli import main
from flt_mol.outputs import check_file, check_folder

CSV = (".csv",)
PROC = Path("/proc")
FOUR = ["--id", "a.csv", "--ood-ads", "b.csv", "--ood-cat", "c.csv", "--ood-both", "d.csv"]
needs_proc = pytest.mark.skipif(not PROC.is_dir(), reason="a system without /proc")


def everything(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_good_places_pass_and_nothing_is_left(tmp_path):
    old = tmp_path / "old.csv"
    old.write_text("mine")
    before = everything(tmp_path)
    for path in (old, tmp_path / "new.csv", tmp_path / "a" / "b" / "new.csv"):
        check_file(path, CSV, "-o FILE")
        check_folder(path.parent, "--output FOLDER", ["results.json"])
    assert everything(tmp_path) == before
    assert old.read_text() == "mine"


@needs_proc
@pytest.mark.parametrize("below", ["x.csv", "new/x.csv"])
def test_folders_whose_permissions_promise_too_much(below):
    with pytest.raises(ValueError, match=r"no (file can be made|permission) in /proc.*-o FILE"):
        check_file(PROC / below, CSV, "-o FILE")
    with pytest.raises(ValueError, match=r"no (file can be made|permission) in /proc.*OUTPUT"):
        check_folder(PROC / below, "OUTPUT")


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(ValueError, match="No space left on device"):
        check_file(tmp_path / "x.csv", CSV, "-o FILE")


@pytest.mark.parametrize("length", [245, 300])
def test_names_too_long_for_the_temporary_one_beside(length, tmp_path):
    name = "a" * (length - 4) + ".csv"
    for path in (tmp_path / name, tmp_path / "new" / name):
        with pytest.raises(ValueError, match="File name too long"):
            check_file(path, CSV, "-o FILE")
    if length > 255:
        with pytest.raises(ValueError, match="File name too long"):
            check_folder(tmp_path / name, "OUTPUT")


def test_links_and_things_in_the_way(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="link is a link to what does not exist"):
        check_folder(tmp_path / "link", "OUTPUT")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file"):
        check_folder(tmp_path / "file" / "new", "OUTPUT")
    (tmp_path / "results.json").mkdir()
    with pytest.raises(ValueError, match=r"results.json: it is a folder; move it"):
        check_folder(tmp_path, "OUTPUT", ["results.json"])
    (tmp_path / "x.csv").mkdir()
    with pytest.raises(ValueError, match="it is a folder"):
        check_file(tmp_path / "x.csv", CSV, "-o FILE")


@needs_proc
@pytest.mark.parametrize(
    "arguments",
    [
        ["predict", "emt_small", "slab.traj", "-o", "/proc/x.csv"],
        ["evaluate", "emt_small", "--split", "val_id", "--output", "/proc/x"],
        ["evaluate", "--predictions", "missing.csv", "--output", "/proc/x"],
        ["export", "emt_small", "/proc/x"],
        ["data", "convert", "slab.traj", "/proc/x.lmdb"],
        ["data", "split", "slab.traj", "/proc/x"],
        ["submission", "make", "/proc/x.npz", *FOUR],
    ],
)
def test_commands_ask_before_they_begin(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    platinum().write("slab.traj")
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: cannot write /proc/x" in err
    assert "/proc" in err
    assert os.listdir(tmp_path) == ["slab.traj"]
