"""Our own files of OC20's records: small, fast to read, and described in docs/compact.md."""

from flt_mol.data.compact.blocks import BLOCK, in_blocks, pack
from flt_mol.data.compact.decoding import CompactRecord, decode
from flt_mol.data.compact.encoding import encode
from flt_mol.data.compact.writing import write_compact

__all__ = ["BLOCK", "CompactRecord", "decode", "encode", "in_blocks", "pack", "write_compact"]
