"""Compressed files, known by what they hold."""

import bz2
import gzip
import lzma
from pathlib import Path

import pytest

from flt_mol.compressed import packing, plain_suffix, read_text

WAYS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, None: lambda data: data}
TEXT = "sid,energy\n1,−0.5\n"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.csv.bz2", "a"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_texts_are_read_whatever_their_names_say(way, name, mark, tmp_path):
    data = WAYS[way]((mark + TEXT).encode())
    (tmp_path / name).write_bytes(data)
    assert packing(data) == way
    assert read_text(tmp_path / name) == TEXT


def test_a_text_that_begins_like_bzip2():
    assert packing(b"BZhou's slab\n1.0\n") is None
    assert packing(bz2.compress(b"")) == "bzip2"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(TEXT.encode() * 9)[:-6], "is cut off or damaged, as a gzip file"),
        (bz2.compress(TEXT.encode())[:20], "is cut off or damaged, as a bzip2 file"),
        (lzma.compress(TEXT.encode())[:-3], "is cut off or damaged, as a xz file"),
        (b"PK\x03\x04 and so on", "is a zip archive .spreadsheets are, too.* save it as .csv"),
        (b"sid,energy\n\xe4,1\n", r"is no text in UTF-8 \(byte 11\)"),
        (gzip.compress(b"\xff\xfe"), r"is no text in UTF-8 \(byte 0\)"),
    ],
)
def test_what_is_no_text(data, message, tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.csv {message}"):
        read_text(path)


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"a\.csv does not exist \(looked in"):
        read_text(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="cannot be read"):
        read_text(tmp_path)


def test_suffixes():
    names = ["a.json", "a.JSON.GZ", "a.csv.xz", "a.gz", "a"]
    assert [plain_suffix(Path(name)) for name in names] == [".json", ".json", ".csv", "", ""]
