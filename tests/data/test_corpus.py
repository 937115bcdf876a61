import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from dmc.data import Blend, PackedTokens, TextSource, build_packed, pack_documents, train_tokenizer
from dmc.data.tokenizer import encode_documents

LENGTH = 16


def cached_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def only_tokens(folder: Path) -> Path:
    (path,) = folder.glob("*.bin")
    return path


@pytest.fixture
def built(corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> PackedTokens:
    return build_packed(TextSource(str(corpus)), tokenizer, LENGTH, tmp_path / "cache")


def test_cached_tokens_are_the_packed_documents(
    built: PackedTokens, corpus: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = [path.read_text() for path in sorted(corpus.iterdir())]
    expected = pack_documents(encode_documents(tokenizer, texts), tokenizer.eos_token_id)
    assert np.array_equal(built.tokens, expected)
    assert (built.num_documents, built.num_skipped, built.num_tokens) == (40, 0, len(expected))
    assert built.tokens.dtype == np.uint16
    parts = np.split(expected, np.flatnonzero(expected == tokenizer.eos_token_id) + 1)
    assert [tokenizer.decode(part[:-1]) for part in parts[:-1]] == texts


def test_two_builds_write_identical_bytes(
    built: PackedTokens, corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    build_packed(TextSource(str(corpus)), tokenizer, LENGTH, tmp_path / "again")
    files = cached_files(tmp_path / "cache")
    assert files == cached_files(tmp_path / "again")
    assert sorted(Path(name).suffix for name in files) == [".bin", ".json"]


def test_second_build_reads_the_cache_whatever_the_length_and_weight(
    built: PackedTokens, corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: Any
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr("dmc.data.corpus.encode_documents", fail)
    again = build_packed(TextSource(str(corpus), weight=3), tokenizer, 2 * LENGTH, tmp_path / "cache")
    assert np.array_equal(again.tokens, built.tokens)
    assert (again.num_documents, again.num_skipped) == (built.num_documents, built.num_skipped)


def test_changed_text_or_tokenizer_makes_another_file(
    built: PackedTokens, corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    cache = tmp_path / "cache"
    other = train_tokenizer(["other words entirely, other words"], 300, tmp_path / "other")
    build_packed(TextSource(str(corpus)), other, LENGTH, cache)
    assert len(list(cache.glob("*.bin"))) == 2
    (corpus / "000.txt").write_text("changed text")
    build_packed(TextSource(str(corpus)), tokenizer, LENGTH, cache)
    assert len(list(cache.glob("*.bin"))) == 3
    path = corpus / "001.txt"
    os.utime(path, ns=(0, 0))
    build_packed(TextSource(str(corpus)), tokenizer, LENGTH, cache)
    assert len(list(cache.glob("*.bin"))) == 4


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def overwrite(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def remove_tokens(path: Path) -> None:
    path.unlink()


def remove_sidecar(path: Path) -> None:
    path.with_suffix(".json").unlink()


def tear_sidecar(path: Path) -> None:
    path.with_suffix(".json").write_text('{"key": ')


def replace_sidecar(path: Path) -> None:
    path.with_suffix(".json").write_text('["something else"]')


def rename_key(path: Path) -> None:
    record = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(record | {"key": "0"}))


@pytest.mark.parametrize(
    "damage", [truncate, overwrite, remove_tokens, remove_sidecar, tear_sidecar, replace_sidecar, rename_key]
)
def test_damaged_cache_is_rebuilt_with_a_warning(
    damage: Any,
    built: PackedTokens,
    corpus: Path,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = tmp_path / "cache"
    files = cached_files(cache)
    damage(only_tokens(cache))
    again = build_packed(TextSource(str(corpus)), tokenizer, LENGTH, cache)
    assert cached_files(cache) == files
    assert len(again) == len(built)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "rebuilt" in record.getMessage()


class InterruptedSource:
    """Yields some documents and breaks off."""

    label = "interrupted"
    weight = 1.0

    def check(self) -> None:
        pass

    def description(self) -> dict[str, Any]:
        return {"interrupted": True}

    def documents(self) -> Iterator[str | None]:
        yield "word " * 10
        yield "word " * 100
        raise KeyboardInterrupt


def test_interrupted_build_leaves_no_file(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmc.data.corpus._BATCH_CHARACTERS", 1)  # the first batch is written before the interruption
    with pytest.raises(KeyboardInterrupt):
        build_packed(InterruptedSource(), tokenizer, LENGTH, tmp_path / "cache")
    assert cached_files(tmp_path / "cache") == {}


def test_builds_at_the_same_time_agree(
    corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, built: PackedTokens
) -> None:
    results: list[PackedTokens] = []
    arguments = (TextSource(str(corpus)), tokenizer, LENGTH, tmp_path / "shared")
    threads = [threading.Thread(target=lambda: results.append(build_packed(*arguments))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(np.array_equal(result.tokens, built.tokens) for result in results)
    assert len(cached_files(tmp_path / "shared")) == 2


def test_several_sources_become_a_blend_in_their_weights(
    corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    sources = [
        TextSource(str(corpus), files="00*.txt", weight=3),
        TextSource(str(corpus), files=["01*.txt", "02*.txt"], weight=1),
    ]
    blend = build_packed(sources, tokenizer, LENGTH, tmp_path / "cache", seed=3)
    assert isinstance(blend, Blend)
    assert blend.seed == 3
    assert [dataset.num_documents for dataset in blend.datasets] == [10, 20]
    assert sum(blend[position]["source"] == 0 for position in range(40)) == 30


def test_skipped_documents_are_counted_and_reported_once(
    corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    (corpus / "900.txt").write_bytes(b"\xff\xfe\x00broken")
    (corpus / "901.txt").write_bytes(b"")
    (corpus / "902.txt").write_bytes(b" \n\n")
    packed = build_packed(TextSource(str(corpus)), tokenizer, LENGTH, tmp_path / "cache")
    assert (packed.num_documents, packed.num_skipped) == (40, 3)
    (record,) = caplog.records
    assert "skipped 2 empty and 1 undecodable documents, kept 40" in record.getMessage()
    again = build_packed(TextSource(str(corpus)), tokenizer, LENGTH, tmp_path / "cache")
    assert again.num_skipped == 3 and len(caplog.records) == 1


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xff"])
def test_corpus_without_text_is_refused_before_anything_is_written(
    content: bytes, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match="is empty: no document holds text"):
        build_packed(TextSource(str(tmp_path / "a.txt")), tokenizer, LENGTH, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_every_source_is_checked_before_the_first_is_tokenised(
    corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    sources = [TextSource(str(corpus)), TextSource(str(tmp_path / "missing.txt"))]
    with pytest.raises(FileNotFoundError, match=r"missing\.txt"):
        build_packed(sources, tokenizer, LENGTH, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_wrong_arguments_are_refused(corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    source = TextSource(str(corpus))
    with pytest.raises(ValueError, match="No source of documents"):
        build_packed([], tokenizer, LENGTH, tmp_path / "cache")
    with pytest.raises(ValueError, match="sequence_length=0"):
        build_packed(source, tokenizer, 0, tmp_path / "cache")
    with pytest.raises(ValueError, match="fewer than one sequence"):
        build_packed(source, tokenizer, 10**6, tmp_path / "cache")
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="no eos token"):
        build_packed(source, bare, LENGTH, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_checksum_covers_every_byte_of_a_file_of_some_megabytes(tmp_path: Path) -> None:
    from dmc.data.corpus import _checksum

    content = bytearray(np.random.default_rng(0).bytes(3 * 2**20 + 12_345))
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)
    expected = _checksum(path)
    for place in np.linspace(0, len(content) - 1, 20).astype(int).tolist():
        content[place] ^= 1
        path.write_bytes(content)
        assert _checksum(path) != expected
        content[place] ^= 1
