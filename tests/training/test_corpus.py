from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from zeco.core.errors import ArgumentError
from zeco.training.baselines import measure_baselines
from zeco.training.corpus import decode, encode, load_corpus


def make_folder(root: Path, num_files: int = 40) -> Path:
    for i in range(num_files):
        path = root / f"part{i % 3}" / f"file{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of file {i}")
    return root


def files_of(part: np.ndarray) -> set[bytes]:
    return set(part.tobytes().split(b"\0")) - {b""}


def test_files_are_split_disjointly_and_completely(tmp_path: Path) -> None:
    corpus = load_corpus(make_folder(tmp_path), held_out=0.2)
    train, held_out = files_of(corpus.train), files_of(corpus.held_out)
    assert not train & held_out
    assert train | held_out == {f"text of file {i}".encode() for i in range(40)}
    assert corpus.num_files == (len(train), len(held_out))
    assert 1 <= len(held_out) <= 16


def test_split_is_stable_when_a_file_is_added(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    before = load_corpus(folder, held_out=0.2)
    (folder / "another.txt").write_text("another")
    after = load_corpus(folder, held_out=0.2)
    assert files_of(before.held_out) <= files_of(after.held_out)
    assert files_of(before.train) <= files_of(after.train)


def test_folder_options(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / ".hidden").write_text("hidden")
    (folder / "program.py").write_text("program")
    (folder / "binary.txt").write_bytes(b"a\0b")
    corpus = load_corpus(folder, suffixes=[".txt"])
    everything = files_of(corpus.train) | files_of(corpus.held_out)
    assert len(everything) == 40
    assert corpus.num_skipped == 1
    small = load_corpus(folder, suffixes=[".txt"], max_bytes=100)
    assert len(small.train) + len(small.held_out) <= 100
    again = load_corpus(folder, suffixes=[".txt"], max_bytes=100)
    assert np.array_equal(small.train, again.train)


def test_single_file_is_cut_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(65, 75)) * 10)
    corpus = load_corpus(path, held_out=0.1)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == path.read_bytes()
    assert len(corpus.held_out) == 10


def test_standard_library_is_the_default() -> None:
    corpus = load_corpus(None, max_bytes=200_000)
    assert b"def " in corpus.train.tobytes()
    assert len(corpus.held_out) > 0


def test_missing_empty_and_binary_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"nowhere does not exist"):
        load_corpus(tmp_path / "nowhere")
    with pytest.raises(ArgumentError, match=r"holds 0 files of text ending in \.txt"):
        load_corpus(tmp_path, suffixes=[".txt"])
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(ArgumentError, match=r"empty\.txt holds 0 bytes"):
        load_corpus(empty)
    empty.write_bytes(b"a\0b")
    with pytest.raises(ArgumentError, match="NUL"):
        load_corpus(empty)


def test_bytes_are_tokens() -> None:
    assert decode(encode("für ∞")) == "für ∞"
    assert decode([0, 195]) == "\n\ufffd"


def test_baselines_of_a_known_text() -> None:
    held_out = np.frombuffer(b"aaab" * 16, dtype=np.uint8)
    train = np.frombuffer(b"ab" * 8, dtype=np.uint8)
    found = measure_baselines(train, held_out)
    assert found.own_frequencies == pytest.approx(0.75 * np.log2(4 / 3) + 0.25 * 2)
    assert found.train_frequencies == pytest.approx(-np.log2(9 / (16 + 256)))
    assert found.gzip == len(gzip.compress(held_out.tobytes(), 9)) * 8 / 64
