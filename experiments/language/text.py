"""Texts as token ids: what comes with Python, or a file; byte-level BPE."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

TOPICS, STDLIB = "pydoc_topics", "stdlib_docstrings"
_NO_DOCUMENTATION = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3"}


class Corpus(NamedTuple):
    """Token ids (int64) of the two parts of a text, and how many ids and bytes there are.

    Attributes:
        name: of the text.
        train, test: ids, the last tenth of the text being the test part.
        vocabulary: number of ids.
        bytes_per_token: of the test part.
    """

    name: str
    train: Tensor
    test: Tensor
    vocabulary: int
    bytes_per_token: float


def read_text(source: str) -> tuple[str, str]:
    """Name and content of "pydoc_topics", "stdlib_docstrings", or a UTF-8 file."""
    if source == TOPICS:
        from pydoc_data.topics import topics

        return TOPICS, "\n\n".join(topics[name] for name in sorted(topics))
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        files = [p for p in sorted(root.rglob("*.py")) if not _NO_DOCUMENTATION & set(p.parts)]
        return STDLIB, "\n\n".join(_docstrings(path) for path in files)
    return Path(source).name, Path(source).read_text(encoding="utf-8")


def _docstrings(path: Path) -> str:
    """All docstrings of a module, in order; nothing of files that this Python does not parse."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(text for text in found if text)


def corpus(source: str, vocabulary: int) -> Corpus:
    """The text as ids of a byte-level BPE that is learned on its first nine tenths.

    Raises:
        ImportError: `tokenizers` is not installed.
    """
    from tokenizers import ByteLevelBPETokenizer

    name, text = read_text(source)
    end = int(0.9 * len(text))
    parts = text[:end], text[end:]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([parts[0]], vocab_size=vocabulary, show_progress=False)
    train, test = (torch.tensor(tokenizer.encode(part).ids) for part in parts)
    return Corpus(name, train, test, vocabulary, len(parts[1].encode()) / len(test))


def batches(ids: Tensor, length: int, size: int, steps: int, seed: int) -> list[Tensor]:
    """Random windows (size, length + 1), the same for every model."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - length - 1, (steps, size), generator=generator)
    return [ids[at[:, None] + torch.arange(length + 1)] for at in starts]


def windows(ids: Tensor, length: int) -> Tensor:
    """All tokens in windows (W, length + 1) that overlap by one token."""
    return ids.unfold(0, length + 1, length)
