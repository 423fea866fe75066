import os

import pytest

from flt_mol.files import temporary_path


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
