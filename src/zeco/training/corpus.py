"""Text as bytes: files found in a fixed order, some of them held out.

The tokenizer is the identity: a token is a byte, the vocabulary has 256 entries. Files are joined
by one NUL byte, which text does not contain: it ends a file, and a prompt begins with it.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zeco.core.errors import ArgumentError

Bytes = npt.NDArray[np.uint8]

VOCAB_SIZE = 256
BOUNDARY = 0
_NO_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def encode(text: str) -> list[int]:
    """Return the tokens of a text, which are its UTF-8 bytes.

    >>> encode("é!")
    [195, 169, 33]
    """
    return list(text.encode())


def decode(tokens: Iterable[int]) -> str:
    """Return the text of tokens; bytes that aren't UTF-8 become U+FFFD, boundaries new lines."""
    return bytes(10 if t == BOUNDARY else t for t in tokens).decode(errors="replace")


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text, split.

    Attributes:
        train: bytes to learn from.
        held_out: bytes to evaluate on, of other files (of the end, when there is only one file).
        name: where it comes from.
        num_files: files of each part.
        num_skipped: files left out since they hold NUL bytes and so are no text.
    """

    train: Bytes
    held_out: Bytes
    name: str
    num_files: tuple[int, int]
    num_skipped: int


def load_corpus(
    path: Path | None,
    *,
    suffixes: Sequence[str] = (),
    held_out: float = 0.05,
    max_bytes: int | None = None,
) -> Corpus:
    """Read a file, or a folder and all below it.

    A file is held out, and chosen under ``max_bytes``, by a hash of its path in the folder: the
    split is the same everywhere, and another file added to the folder does not change it.

    Args:
        path: file or folder; None is the Python standard library's sources, tests left out.
        suffixes: file name endings to take from a folder; none takes all. Hidden files are not
            taken.
        held_out: the share of files, or of a lone file's bytes, to hold out.
        max_bytes: use at most this much.

    Raises:
        ArgumentError: the path is missing or can't be read, or holds too little text.
    """
    if path is None:
        path, suffixes = Path(sysconfig.get_path("stdlib")), (".py",)
        name, without = "Python standard library", _NO_SOURCES
    else:
        name, without = str(path), set[str]()
    if not path.exists():
        raise ArgumentError(f"data path {path} does not exist; give a file or folder of text")
    if path.is_file():
        return _split_file(path, held_out, max_bytes)
    found = list(_walk(path, suffixes, without))
    texts = {key: text for key, text in found if text and b"\0" not in text}
    num_skipped = sum(b"\0" in text for _, text in found)
    if max_bytes is not None:
        texts = _choose(texts, max_bytes)
    if len(texts) < 2:
        wanted = f" ending in {', '.join(suffixes)}" if suffixes else ""
        limit = f" within max_bytes={max_bytes}" if max_bytes is not None else ""
        raise ArgumentError(
            f"data path {path} holds {len(texts)} files of text{wanted}{limit}, but one to train "
            "on and one to hold out are needed; give another folder, or a single file"
        )
    out = _held_out_keys(list(texts), held_out)
    parts = [_join(texts[k] for k in texts if (k in out) == kept) for kept in (False, True)]
    counts = (len(texts) - len(out), len(out))
    return Corpus(parts[0], parts[1], name, counts, num_skipped)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"data path {path} can't be read: {error.strerror}") from error


def _split_file(path: Path, held_out: float, max_bytes: int | None) -> Corpus:
    text = _read(path)[:max_bytes]
    if b"\0" in text:
        raise ArgumentError(f"data path {path} holds NUL bytes and so is no text; give a text file")
    cut = len(text) - max(1, round(len(text) * held_out))
    if cut < 1:
        raise ArgumentError(
            f"data path {path} holds {len(text)} bytes, too few to train on and to hold out; "
            "give a longer text"
        )
    data = np.frombuffer(text, dtype=np.uint8)
    return Corpus(data[:cut], data[cut:], str(path), (1, 1), 0)


def _walk(folder: Path, suffixes: Sequence[str], without: set[str]) -> Iterator[tuple[str, bytes]]:
    """Yield (path in the folder, content) in the order of the paths."""
    below = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*")}
    for key in sorted(below):
        parts = key.split("/")
        hidden = any(part.startswith(".") for part in parts)
        taken = not suffixes or key.endswith(tuple(suffixes))
        if not hidden and taken and without.isdisjoint(parts) and below[key].is_file():
            yield key, _read(below[key])


def _hash(purpose: str, key: str) -> float:
    """Map a file's path to [0, 1), differently for each purpose."""
    digest = hashlib.sha256(f"{purpose}\n{key}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _choose(texts: dict[str, bytes], max_bytes: int) -> dict[str, bytes]:
    chosen: set[str] = set()
    total = 0
    for key in sorted(texts, key=lambda key: _hash("choose", key)):
        size = len(texts[key]) + 1
        if total + size <= max_bytes:
            chosen.add(key)
            total += size
    return {key: text for key, text in texts.items() if key in chosen}


def _held_out_keys(keys: Sequence[str], share: float) -> set[str]:
    """Choose the files to hold out: at least one, and not all."""
    by_hash = sorted(keys, key=lambda key: _hash("hold out", key))
    count = sum(_hash("hold out", key) < share for key in keys)
    return set(by_hash[: min(max(count, 1), len(keys) - 1)])


def _join(texts: Iterable[bytes]) -> Bytes:
    return np.frombuffer(b"".join(text + bytes([BOUNDARY]) for text in texts), dtype=np.uint8)
