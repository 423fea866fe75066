"""Files of structures whose names and contents disagree on compression."""

import bz2
import gzip

import ase.io
import pytest
from slabs import platinum

from flt_mol.data import open_dataset

NAMES = ["a.extxyz", "a.xyz", "a.traj", "a.cif", "POSCAR"]


def packed(folder, name, given, way=gzip.compress):
    """A file of the format of `name`, compressed or not, under the name `given`."""
    source = folder / f"made {name}"
    ase.io.write(source, platinum(), format="vasp" if name == "POSCAR" else None)
    path = folder / given
    path.write_bytes(way(source.read_bytes()))
    return path


@pytest.mark.filterwarnings("ignore:.*all tags are 0|.*no cell|.*does not end")
@pytest.mark.parametrize("name", NAMES)
def test_names_and_contents(name, tmp_path):
    assert len(open_dataset(packed(tmp_path, name, f"{name}.gz"))) == 1
    path = packed(tmp_path, name, name)
    with pytest.raises(ValueError, match=rf"compressed \(gzip\), and .* rename it to {name}\.gz"):
        open_dataset(path)
    path = packed(tmp_path, name, f"{name}.bz2")
    with pytest.raises(ValueError, match=r"compressed \(gzip\), and not called so"):
        open_dataset(path)
    path = packed(tmp_path, name, f"{name}.gz", lambda data: data)
    with pytest.raises(ValueError, match=rf"not compressed, though .* rename it to {name}$"):
        open_dataset(path)
    path = packed(tmp_path, name, f"{name}.gz", lambda data: gzip.compress(data)[:-9])
    with pytest.raises(ValueError, match="is cut off or damaged, as a "):
        open_dataset(path)


@pytest.mark.parametrize("name", ["a.db", "a.json"])
def test_databases_are_unpacked_first(name, tmp_path):
    for given in (name, f"{name}.gz"):
        path = packed(tmp_path, name, given)
        with pytest.raises(ValueError, match=r"is compressed \(gzip\): unpack it first"):
            open_dataset(path)


def test_other_kinds(tmp_path):
    path = packed(tmp_path, "a.extxyz", "a.extxyz", bz2.compress)
    with pytest.raises(ValueError, match=r"compressed \(bzip2\).* rename it to a\.extxyz\.bz2"):
        open_dataset(path)
    path = packed(tmp_path, "a.extxyz", "a.zip", lambda data: b"PK\x03\x04" + data)
    with pytest.raises(ValueError, match=r"is compressed \(zip\): unpack it first"):
        open_dataset(path)
    path = packed(tmp_path, "a.extxyz", "a.lmdb.gz")
    with pytest.raises(ValueError, match=r"is compressed \(gzip\): unpack it first"):
        open_dataset(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="empty"):
        open_dataset(path.rename(tmp_path / "a.extxyz.gz"))
