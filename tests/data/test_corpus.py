import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from dmc.data import Blend, PackedTokens, TextSource, build_packed, pack_documents, train_tokenizer
from dmc.data.tokenizer import encode_documents

LENGTH = 16


def cached_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
    assert sorted(Path(name).name for name in files) == ["00000.bin", "00000.json", "index.json"]


def test_second_build_reads_the_cache_whatever_the_length_and_weight(
    built: PackedTokens, corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: Any
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr("dmc.data.token_cache.encode_documents", fail)
    again = build_packed(TextSource(str(corpus), weight=3), tokenizer, 2 * LENGTH, tmp_path / "cache")
    assert np.array_equal(again.tokens, built.tokens)
    assert (again.num_documents, again.num_skipped) == (built.num_documents, built.num_skipped)


def test_changed_text_or_tokenizer_makes_another_folder(
    built: PackedTokens, corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    cache = tmp_path / "cache"
    other = train_tokenizer(["other words entirely, other words"], 300, tmp_path / "other")
    build_packed(TextSource(str(corpus)), other, LENGTH, cache)
    assert len(list(cache.iterdir())) == 2
    (corpus / "000.txt").write_text("changed text")
    build_packed(TextSource(str(corpus)), tokenizer, LENGTH, cache)
    assert len(list(cache.iterdir())) == 3
    path = corpus / "001.txt"
    os.utime(path, ns=(0, 0))
    build_packed(TextSource(str(corpus)), tokenizer, LENGTH, cache)
    assert len(list(cache.iterdir())) == 4


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
    with pytest.raises(ValueError, match=r"is empty: (no document holds text|its files have no bytes)"):
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
