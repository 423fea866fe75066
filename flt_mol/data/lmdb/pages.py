"""The pages of an LMDB file, checked before LMDB follows them.

LMDB trusts what it reads: a page that is a hole in the file, or was overwritten, ends the process
with a failed assertion or a signal. So the tree of the main database is walked here first, with
every number checked that LMDB would use as an address. Nor does LMDB notice that records are lost:
so the keys must be in order, no page may serve twice, and the two meta pages must tell of
transactions that follow each other, or the newer one might have been overlooked. The layout is
that of LMDB 0.9 (mdb.c) on little-endian machines of 64 bits:

    page  pgno u64, pad u16, flags u16, lower u16, upper u16, then node offsets u16 from the start
          of the page; (lower - 16) / 2 nodes
    node  low u16, high u16, flags u16, key size u16, key, data. In a branch, low, high and flags
          are the number of the child; in a leaf, low and high are the size of the data, and data
          larger than a page's share lie on pages of their own, whose first number is stored
    meta  16 bytes of page header, magic, version, address, map size, two MDB_db structs of 48
          bytes (free pages, main), last page, transaction
    db    pad u32 (of the first: the page size), flags u16, depth u16, branch, leaf and overflow
          pages u64, entries u64, root u64
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np

__all__ = ["MAGIC", "META_SIZE", "Meta", "check_tree", "follow", "read_metas"]

MAGIC = 0xBEEFC0DE
_META = struct.Struct("<10x H 4x I I Q Q I 44x 4x H H 24x Q Q Q Q")
META_SIZE = _META.size
_PAGE = struct.Struct("<Q 2x H H H")
_NODE = struct.Struct("<H H H H")
_PGNO = struct.Struct("<Q")
_VERSION = 1
_NO_PAGE = 2**64 - 1
_BRANCH, _LEAF, _META_PAGE = 1, 2, 8
_IN_MEMORY = 0x10 | 0x4000 | 0x8000  # flags of a page that mean nothing in a file
_BIG, _SUBDATA = 1, 2  # flags of a node
_DEEPEST = 32  # LMDB's own limit
_LONGEST_KEY = 511


@dataclass(frozen=True)
class Meta:
    """What one of the two meta pages says."""

    page_flags: int
    magic: int
    version: int
    address: int
    map_size: int
    page_size: int
    flags: int
    depth: int
    entries: int
    root: int
    last_page: int
    transaction: int

    @property
    def valid(self) -> bool:
        """Whether LMDB would accept it."""
        size = self.page_size
        return (
            bool(self.page_flags & _META_PAGE)
            and (self.magic, self.version) == (MAGIC, _VERSION)
            and 256 <= size <= 1 << 16
            and size & (size - 1) == 0
        )


def read_metas(file: BinaryIO) -> list[Meta]:
    """Both meta pages; fewer where the file ends or the first gives no page size."""
    metas: list[Meta] = []
    for _ in range(2):
        file.seek(metas[0].page_size if metas else 0)
        data = file.read(META_SIZE)
        if len(data) < META_SIZE:
            break
        metas.append(Meta(*_META.unpack(data)))
        if not metas[0].valid:
            break
    return metas


def follow(metas: Sequence[Meta]) -> bool:
    """Whether the meta pages are those of two commits, one after the other, each in its place.

    Commits write page 0 and page 1 in turn, and files only grow; without any commit, transaction 0
    is in both.
    """
    older, newer = sorted(metas, key=lambda meta: meta.transaction)
    if newer.transaction == 0:
        return True
    return (
        newer.transaction == older.transaction + 1
        and metas[0].transaction % 2 == 0
        and newer.last_page >= older.last_page
    )


def check_tree(path: Path, meta: Meta) -> None:
    """Walk the main database's branches and leaves; the records on overflow pages stay unread.

    Args:
        path: the file, at least `meta.last_page` + 1 pages long.
        meta: the newer meta page.

    Raises:
        ValueError: a page or node that does not fit its place, naming file and page.
    """
    if meta.flags:
        raise ValueError(f"{path} holds no plain records (LMDB flags {meta.flags:#x})")
    if meta.root == _NO_PAGE:
        return
    with path.open("rb", buffering=0) as file:
        walk = _Walk(path, file, meta)
        level = [walk.visit(meta.root)]
        if not 1 <= meta.depth <= _DEEPEST:
            walk.fail(meta.root, f"the tree is {meta.depth} pages deep")
        for _ in range(meta.depth - 1):
            level = [child for page in level for child in walk.branch(page)]
        entries = sum(walk.leaf(page) for page in level)
        walk.check_overlaps()
    if entries != meta.entries:
        raise ValueError(
            f"{path} is damaged: {meta.entries} records are announced, {entries} are there; "
            "download or write it again"
        )


class _Walk:
    """Reads pages, and refuses those that LMDB could not survive."""

    def __init__(self, path: Path, file: BinaryIO, meta: Meta) -> None:
        self.path = path
        self.file = file
        self.size = meta.page_size
        self.last = meta.last_page
        self.seen: set[int] = set()
        self.lowest: dict[int, bytes] = {}  # what a page's keys may not be below
        self.previous = b""  # the key before
        self.large = (array("Q"), array("Q"))  # first pages and numbers of pages of large records

    def fail(self, number: int, reason: str) -> NoReturn:
        """Raise ValueError about a page."""
        raise ValueError(
            f"{self.path} is damaged: page {number} ({reason}); download or write it again"
        )

    def visit(self, number: int) -> int:
        """The number of a page that may be read: inside the file, and not met before."""
        if not 2 <= number <= self.last:
            self.fail(number, f"the file has pages 2 to {self.last}")
        if number in self.seen:
            self.fail(number, "is named twice")
        self.seen.add(number)
        return number

    def nodes(self, number: int, kind: int) -> tuple[bytes, tuple[int, ...]]:
        """The page, and where its nodes begin."""
        self.file.seek(number * self.size)
        page = self.file.read(self.size)
        if len(page) < self.size:
            self.fail(number, "cannot be read")
        stored, flags, lower, upper = _PAGE.unpack_from(page)
        if stored != number or flags & ~_IN_MEMORY != kind:
            zeros = not page.strip(b"\0")
            self.fail(number, "zeros: a hole" if zeros else "is not the page that it should be")
        count = (lower - _PAGE.size) // 2
        # LMDB asserts that a branch has two children.
        if lower & 1 or not _PAGE.size <= lower <= upper <= self.size or count < 3 - kind:
            self.fail(number, f"its nodes end at {lower} and begin at {upper}")
        offsets = struct.unpack_from(f"<{count}H", page, _PAGE.size)
        if (
            min(offsets) < upper
            or max(offsets) + _NODE.size > self.size
            or any(offset & 1 for offset in offsets)
        ):
            self.fail(number, "a node lies outside")
        return page, offsets

    def branch(self, number: int) -> list[int]:
        """The children of a branch page."""
        page, offsets = self.nodes(number, _BRANCH)
        children = []
        for index, offset in enumerate(offsets):
            low, high, top, length = _NODE.unpack_from(page, offset)
            end = offset + _NODE.size + length
            if end > self.size or length > _LONGEST_KEY:
                self.fail(number, "a key lies outside")
            child = self.visit(low | high << 16 | top << 32)
            # The first key of a branch is not used.
            if index:
                self.lowest[child] = page[offset + _NODE.size : end]
            elif number in self.lowest:
                self.lowest[child] = self.lowest[number]
            children.append(child)
        return children

    def leaf(self, number: int) -> int:
        """The number of records of a leaf page, each found to lie inside the file."""
        page, offsets = self.nodes(number, _LEAF)
        lowest = self.lowest.get(number)
        if lowest is None:
            lowest = b""
        elif lowest <= self.previous:
            self.fail(number, "its keys are out of order")
        previous = self.previous
        for offset in offsets:
            low, high, flags, length = _NODE.unpack_from(page, offset)
            size = low | high << 16
            start = offset + _NODE.size + length
            end = start + (_PGNO.size if flags & _BIG else size)
            if (
                flags not in (0, _BIG, _SUBDATA)
                or not 1 <= length <= _LONGEST_KEY
                or end > self.size
            ):
                self.fail(number, "a record lies outside")
            key = page[offset + _NODE.size : start]
            if not previous < key >= lowest:
                self.fail(number, "its keys are out of order")
            previous = key
            if flags & _BIG:
                self.visit_large(number, size, _PGNO.unpack_from(page, start)[0])
        self.previous = previous
        return len(offsets)

    def visit_large(self, number: int, size: int, first: int) -> None:
        """Note the pages of a large record."""
        pages = -(-(size + _PAGE.size) // self.size)
        if first < 2 or first + pages - 1 > self.last:
            self.fail(number, "a large record lies outside the file")
        self.large[0].append(first)
        self.large[1].append(pages)

    def check_overlaps(self) -> None:
        """Refuse pages that serve twice: of two large records, or of one and the tree."""
        tree = np.fromiter(self.seen, np.uint64, len(self.seen))
        first = np.concatenate([tree, np.array(self.large[0], np.uint64)])
        pages = np.concatenate([np.ones_like(tree), np.array(self.large[1], np.uint64)])
        order = np.argsort(first)
        first, pages = first[order], pages[order]
        twice = first[1:][first[:-1] + pages[:-1] > first[1:]]
        if len(twice):
            self.fail(int(twice[0]), "is named twice")
