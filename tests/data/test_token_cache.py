import json
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from dmc.data import DocumentSource, PackedTokens, StandardLibrarySource, TextSource, build_packed, pack_documents
from dmc.data.tokenizer import encode_documents

LENGTH = 16
SHARD_BYTES = 1500
CONTEXT = multiprocessing.get_context("forkserver")

Build = Callable[..., PackedTokens]


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmc.data.token_cache.SHARD_BYTES", SHARD_BYTES)


@pytest.fixture
def build(corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Build:
    def run(name: str = "cache", num_processes: int = 1) -> PackedTokens:
        return build_packed(TextSource(str(corpus)), tokenizer, LENGTH, tmp_path / name, num_processes=num_processes)

    return run


@pytest.fixture
def expected(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    texts = [path.read_text() for path in sorted(corpus.iterdir())]
    return pack_documents(encode_documents(tokenizer, texts), tokenizer.eos_token_id)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.bin")}


def rows_of(corpus: Path) -> list[dict[str, str]]:
    return [{"text": path.read_text()} for path in sorted(corpus.iterdir())]


def sources_of(corpus: Path, folder: Path) -> dict[str, DocumentSource]:
    """Write the corpus in every format, each in several files."""
    folder.mkdir()
    for part in range(3):
        rows = datasets.Dataset.from_list(rows_of(corpus)[part::3])
        rows.to_json(folder / f"{part}.jsonl")
        rows.to_csv(folder / f"{part}.csv")
        rows.to_parquet(folder / f"{part}.parquet", batch_size=4)
        (folder / f"{part}.json").write_text(json.dumps(rows.to_list()))
    formats = ("jsonl", "csv", "parquet", "json")
    return {
        "text": TextSource(str(corpus)),
        "library": StandardLibrarySource("validation"),
        **{suffix: TextSource(str(folder), files=f"*.{suffix}") for suffix in formats},
    }


def test_shards_of_every_source_are_its_documents_in_their_order(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = sources_of(corpus, tmp_path / "formats")
    hub = datasets.Dataset.from_list(rows_of(corpus))
    monkeypatch.setattr("dmc.data.text.load_dataset", lambda *_, **__: hub)
    sources["hub"] = TextSource("owner/name")
    for name, source in sources.items():
        whole = list(source.documents())
        assert len(whole) >= 10 and source.num_bytes() > 1000, name
        for num_shards in (1, 2, 7, 100):
            shards = [list(source.documents(shard, num_shards)) for shard in range(num_shards)]
            assert [text for texts in shards for text in texts] == whole, (name, num_shards)
            if num_shards == 7 and name not in ("csv", "json"):  # these begin with their file
                assert sum(map(bool, shards)) >= 6, name


def test_line_belongs_to_the_shard_in_which_it_begins(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "é" * number + str(number)}, ensure_ascii=number % 2 == 0) for number in range(9)]
    for ending in ("", "\n", "\n\n \n"):
        (tmp_path / "a.jsonl").write_text("\n".join(lines[:4]) + "\n", encoding="utf-8")
        (tmp_path / "b.jsonl").write_text("\n".join(lines[4:]) + ending, encoding="utf-8")
        source = TextSource(str(tmp_path))
        whole = [json.loads(line)["text"] for line in lines]
        for num_shards in range(1, 200, 7):
            shards = (source.documents(shard, num_shards) for shard in range(num_shards))
            assert [text for shard in shards for text in shard] == whole


@pytest.mark.parametrize("shard_bytes", [10**9, 3000, 500, 40])
def test_tokens_do_not_depend_on_the_shards(
    shard_bytes: int, build: Build, expected: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmc.data.token_cache.SHARD_BYTES", shard_bytes)
    built = build()
    assert np.array_equal(built.tokens, expected)
    assert (built.num_documents, built.num_skipped) == (40, 0)
    num_bytes = TextSource(str(tmp_path / "corpus")).num_bytes()
    assert len(times(tmp_path / "cache")) == -(-num_bytes // shard_bytes)


def test_number_of_processes_does_not_change_a_byte(build: Build, expected: np.ndarray, tmp_path: Path) -> None:
    assert np.array_equal(build("several", num_processes=3).tokens, expected)
    build("one")
    assert files(tmp_path / "several") == files(tmp_path / "one")
    assert len(times(tmp_path / "one")) > 5


def test_source_without_text_in_some_shards_is_whole(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": ""}\n' * 500 + '{"text": "some words here"}\n' + '{"text": null}\n' * 500
    )
    for _ in range(2):
        packed = build_packed(TextSource(str(tmp_path / "a.jsonl")), tokenizer, 2, tmp_path / "cache", num_processes=1)
        assert (packed.num_documents, packed.num_skipped) == (1, 1000)
        assert tokenizer.decode(packed.tokens[:-1]) == "some words here"


def test_half_a_surrogate_pair_is_a_counted_skip(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud800"}\n{"text": "some words here"}\n')
    packed = build_packed(TextSource(str(tmp_path / "a.jsonl")), tokenizer, 2, tmp_path / "cache")
    assert (packed.num_documents, packed.num_skipped) == (1, 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def remove_tokens(path: Path) -> None:
    path.unlink()


def remove_record(path: Path) -> None:
    path.with_suffix(".json").unlink()
    flip(path)


def tear_record(path: Path) -> None:
    path.with_suffix(".json").write_text('{"key": ')
    flip(path)


def replace_record(path: Path) -> None:
    path.with_suffix(".json").write_text('["something else"]')
    flip(path)


def rename_key(path: Path) -> None:
    record = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(record | {"key": "0"}))
    flip(path)


DAMAGES = (flip, truncate, remove_tokens, remove_record, tear_record, replace_record, rename_key)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shard_alone_is_rebuilt_with_a_warning(
    damage: Any, build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build()
    cache = tmp_path / "cache"
    whole, before = files(cache), times(cache)
    (path,) = cache.rglob("00002.bin")
    damage(path)
    build()
    assert files(cache) == whole
    assert {name for name, time in times(cache).items() if time != before[name]} == {"00002.bin"}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "rebuilt" in record.getMessage() and "00002" in record.getMessage()


@pytest.mark.parametrize("content", ["", '{"key": 1}', "[]", None])
def test_damaged_index_is_rebuilt_from_the_shards(
    content: str | None, build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build()
    cache = tmp_path / "cache"
    whole, before = files(cache), times(cache)
    (path,) = cache.rglob("index.json")
    path.unlink() if content is None else path.write_text(content)
    build()
    assert files(cache) == whole and times(cache) == before
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * (content is not None)


def test_shards_of_another_size_are_replaced(
    build: Build, expected: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build()
    (index,) = tmp_path.rglob("index.json")
    index.unlink()
    monkeypatch.setattr("dmc.data.token_cache.SHARD_BYTES", 2 * SHARD_BYTES)
    assert np.array_equal(build().tokens, expected)
    assert np.array_equal(build().tokens, expected)


class SlowSource(TextSource):
    """Reads a document every few milliseconds, so that there is a moment to kill the reader in."""

    def documents(self, shard: int = 0, num_shards: int = 1) -> Iterator[str | None]:
        for text in super().documents(shard, num_shards):
            time.sleep(0.005)
            yield text


def build_slowly(corpus: str, tokenizer: PreTrainedTokenizerFast, cache: Path, num_processes: int) -> None:
    from dmc.data import token_cache

    token_cache.SHARD_BYTES = SHARD_BYTES
    token_cache._BATCH_CHARACTERS = 300  # a shard is written in several batches
    build_packed(SlowSource(corpus), tokenizer, LENGTH, cache, num_processes=num_processes)


@pytest.mark.parametrize(("num_processes", "moments"), [(1, (0, 1, 2)), (2, (3,))])
def test_killed_build_goes_on_and_keeps_every_whole_shard(
    num_processes: int,
    moments: tuple[int, ...],
    build: Build,
    corpus: Path,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    build("whole")
    cache, chooser = tmp_path / "cache", random.Random(0)
    kept: dict[str, int] = {}
    for num_new in moments:
        known = len(list(cache.rglob("0*.json")))
        process = CONTEXT.Process(target=build_slowly, args=(str(corpus), tokenizer, cache, num_processes))
        process.start()
        while len(list(cache.rglob("0*.json"))) < known + num_new or not list(cache.rglob("*.tmp")):
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(0.01 * chooser.random())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if num_processes > 1:
            time.sleep(0.3)  # its workers see it and end
        finished = {path.with_suffix(".bin").name for path in cache.rglob("0*.json")}
        assert not list(cache.rglob("index.json"))
        assert kept.items() <= times(cache).items(), "a whole shard was written again"
        kept = {name: time for name, time in times(cache).items() if name in finished}
    assert len(kept) >= 3
    build_slowly(str(corpus), tokenizer, cache, 1)
    assert kept.items() <= times(cache).items()
    assert files(cache) == files(tmp_path / "whole")  # the leftovers are gone too


def test_builders_at_the_same_time_agree(
    corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, build: Build
) -> None:
    build("alone")
    results: list[PackedTokens] = []
    arguments = (SlowSource(str(corpus)), tokenizer, LENGTH, tmp_path / "shared")
    builders: list[threading.Thread] = []
    for _ in range(4):
        builders.append(threading.Thread(target=lambda: results.append(build_packed(*arguments, num_processes=1))))
        builders[-1].start()
    for builder in builders:
        builder.join()
    assert len(results) == 4
    assert files(tmp_path / "shared") == files(tmp_path / "alone")


class BrokenSource(TextSource):
    """Breaks off in the midst of its second shard."""

    def documents(self, shard: int = 0, num_shards: int = 1) -> Iterator[str | None]:
        for number, text in enumerate(super().documents(shard, num_shards)):
            if shard == 1 and number:
                raise KeyboardInterrupt
            yield text


def test_interrupted_build_leaves_whole_shards_only(
    corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmc.data.token_cache._BATCH_CHARACTERS", 1)  # written up to the interruption
    with pytest.raises(KeyboardInterrupt):
        build_packed(BrokenSource(str(corpus)), tokenizer, LENGTH, tmp_path / "cache", num_processes=1)
    assert {Path(name).suffix for name in files(tmp_path / "cache")} <= {".bin", ".json"}
    assert not list(tmp_path.rglob("00001.*")) and not list(tmp_path.rglob("index.json"))


class DeadlySource(TextSource):
    """Kills the process that reads its fourth shard, as the kernel does when memory runs out."""

    def documents(self, shard: int = 0, num_shards: int = 1) -> Iterator[str | None]:
        if shard == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().documents(shard, num_shards)


def test_killed_worker_is_an_error_that_says_what_to_do(
    corpus: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ChildProcessError, match=r"was killed.*lower data\.num_processes=2"):
        build_packed(DeadlySource(str(corpus)), tokenizer, LENGTH, tmp_path / "cache", num_processes=2)
