import errno
import os
import sysconfig

import pytest

from flt_mol import files
from flt_mol.files import readable, shipped_folder, temporary_path


def test_the_file_appears_whole_and_folders_are_made(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with temporary_path(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    assert os.listdir(path.parent) == ["a.txt"]


def test_an_error_leaves_the_file_before(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail():
        with temporary_path(path) as temporary:
            temporary.write_text("ha")
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("names", [(), ("/tmp/a", None, "/tmp/b")])
def test_a_full_disk_is_named_by_the_file(tmp_path, names):
    path = tmp_path / "best.ckpt"
    path.write_text("old")

    def fill():
        with temporary_path(path, durable=True) as temporary:
            temporary.write_text("ha")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *names)

    with pytest.raises(OSError, match=r"No space left on device: '.*best.ckpt'$") as found:
        fill()
    assert found.value.errno == errno.ENOSPC
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["best.ckpt"]


def test_durable_files_are_on_the_disk_before_their_name(tmp_path, monkeypatch):
    path, order = tmp_path / "a.txt", []
    real_sync, real_replace = os.fsync, type(path).replace

    def sync(descriptor):
        order.append(("sync", os.path.samestat(os.fstat(descriptor), os.stat(tmp_path))))
        real_sync(descriptor)

    def replace(self, target):
        order.append(("rename", False))
        real_replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(type(path), "replace", replace)
    with temporary_path(path, durable=True) as temporary:
        temporary.write_text("whole")
    assert order == [("sync", False), ("rename", False), ("sync", True)]
    assert path.read_text() == "whole"


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match="inside cannot be read"), readable(tmp_path):
        (tmp_path / "inside").read_bytes()


@pytest.mark.parametrize("kind", ["datasets", "models", "configs"])
def test_each_folder_is_there(kind):
    folder = shipped_folder(kind)
    assert folder.is_dir()
    assert list(folder.rglob("*.yaml"))


def test_a_missing_folder_says_where_it_should_be():
    with pytest.raises(FileNotFoundError, match="nonsense.*reinstall flt_mol"):
        shipped_folder("nonsense")


def test_without_a_checkout_the_wheels_data_is_used(tmp_path, monkeypatch):
    data = tmp_path / "share" / "flt_mol" / "models"
    data.mkdir(parents=True)
    monkeypatch.setattr(files, "_PACKAGE", tmp_path / "site-packages" / "flt_mol")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert shipped_folder("models") == data


def test_data_installed_beside_the_package_is_found(tmp_path, monkeypatch):
    data = tmp_path / "target" / "share" / "flt_mol" / "models"
    data.mkdir(parents=True)
    monkeypatch.setattr(files, "_PACKAGE", tmp_path / "target" / "flt_mol")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "elsewhere"))
    assert shipped_folder("models") == data
