import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import multiprocess
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from dmc.data import PackedTokens, StandardLibrarySource, TextSource, build_packed
from dmc.data import train_tokenizer as train
from dmc.data.encoding import encode_documents

LENGTH = 16
CONTEXT = multiprocessing.get_context("fork")

Build = Callable[..., PackedTokens]


@pytest.fixture
def build(corpus, tmp_path, tokenizer):
    def run(name="cache", tokenize_num_proc=1, **options):
        source = TextSource(str(corpus))
        return build_packed(source, tokenizer, LENGTH, tmp_path / name, tokenize_num_proc=tokenize_num_proc, **options)

    return run


@pytest.fixture
def jobs(monkeypatch):
    """A job for each 100 bytes."""
    monkeypatch.setattr("dmc.data.cache._JOB_BYTES", 100)


@pytest.fixture
def expected(corpus, tokenizer):
    texts = [path.read_text() for path in sorted(corpus.iterdir())]
    return np.concatenate([[*ids, tokenizer.eos_token_id] for ids in encode_documents(tokenizer, texts)])


def tokens_of(packed):
    return packed.tokens.window(0, len(packed.tokens)).token_ids.tolist()


def rows_of(corpus):
    return [{"text": path.read_text()} for path in sorted(corpus.iterdir())]


def test_shards_of_every_source_are_its_documents_in_their_order(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("dmc.data.sources.JSON_LINES_SHARD", 300)
    monkeypatch.setattr("dmc.data.text._HUB_SHARD", 300)
    (folder := tmp_path / "formats").mkdir()
    for part in range(3):
        rows = datasets.Dataset.from_list(rows_of(corpus)[part::3])
        rows.to_json(folder / f"{part}.jsonl")
        rows.to_csv(folder / f"{part}.csv")
        rows.to_parquet(folder / f"{part}.parquet", batch_size=4)
        (folder / f"{part}.json").write_text(json.dumps(rows.to_list()))
    hub = datasets.Dataset.from_list(rows_of(corpus))
    monkeypatch.setattr("dmc.data.text.load_dataset", lambda *_, **__: hub)
    sources = {"text": TextSource(str(corpus)), "hub": TextSource("owner/name")}
    sources["library"] = StandardLibrarySource("validation")
    sources |= {suffix: TextSource(str(folder), files=f"*.{suffix}") for suffix in ("jsonl", "csv", "parquet", "json")}
    for name, source in sources.items():
        documents, stream = list(source.documents()), source.stream()
        assert len(documents) >= 10 and source.num_bytes() > 1000, name
        assert stream.num_shards >= (3 if name in ("csv", "json") else 10), name
        for num_parts in (1, 2, min(7, stream.num_shards)):
            found = [list(source.read(stream.shard(num_parts, part))) for part in range(num_parts)]
            assert [text for texts in found for text in texts] == documents, (name, num_parts)


def test_line_belongs_to_the_shard_in_which_it_begins(tmp_path, monkeypatch):
    lines = [json.dumps({"text": "é" * number + str(number)}, ensure_ascii=number % 2 == 0) for number in range(9)]
    for ending in ("", "\n", "\n\n \n"):
        (tmp_path / "a.jsonl").write_text("\n".join(lines[:4]) + "\n", encoding="utf-8")
        (tmp_path / "b.jsonl").write_text("\n".join(lines[4:]) + ending, encoding="utf-8")
        for num_bytes in range(1, 200, 7):
            monkeypatch.setattr("dmc.data.sources.JSON_LINES_SHARD", num_bytes)
            assert list(TextSource(str(tmp_path)).documents()) == [json.loads(line)["text"] for line in lines]


class NotedSource(TextSource):
    """Notes beside its files which process reads."""

    def read(self, rows):
        noted = Path(self.name).parent / "readers"
        noted.mkdir(exist_ok=True)
        (noted / str(os.getpid())).touch()
        return super().read(rows)


@pytest.mark.parametrize(
    ("tokenize_num_proc", "job_bytes"), [(1, 10**9), (1, 500), (3, 10**9), (3, 3000), (3, 500), (3, 40)]
)
def test_tokens_depend_on_no_number_of_processes_and_as_many_are_used_as_asked(
    tokenize_num_proc, job_bytes, corpus, expected, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr("dmc.data.cache._JOB_BYTES", job_bytes)
    options = {"tokenize_num_proc": tokenize_num_proc}
    built = build_packed(NotedSource(str(corpus)), tokenizer, LENGTH, tmp_path / "cache", **options)
    assert tokens_of(built) == expected.tolist()
    assert (built.tokens.num_documents, built.tokens.num_skipped) == (40, 0)
    children = {path.name for path in (tmp_path / "readers").iterdir()} - {str(os.getpid())}
    assert len(children) == (0 if tokenize_num_proc == 1 or job_bytes > 3000 else tokenize_num_proc)
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == [
        path.name for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")
    ]


def test_second_build_reads_the_cache_whatever_the_length_and_weight(build, corpus, tmp_path, tokenizer, monkeypatch):
    built = build()

    def fail(*_):
        raise AssertionError("tokenized again")

    monkeypatch.setattr("dmc.data.encoding.encode_documents", fail)
    monkeypatch.setattr(TextSource, "stream", fail)
    again = build_packed(TextSource(str(corpus), weight=3), tokenizer, 2 * LENGTH, tmp_path / "cache")
    assert tokens_of(again) == tokens_of(built)


def test_changed_text_or_tokenizer_makes_another_folder(build, corpus, tmp_path, tokenizer):
    def folders():
        return sum(path.is_dir() for path in (tmp_path / "cache").iterdir())

    build()
    other = train(["other words entirely, other words"], 300, tmp_path / "other")
    build_packed(TextSource(str(corpus)), other, LENGTH, tmp_path / "cache")
    assert folders() == 2
    (corpus / "000.txt").write_text("changed text")
    build()
    assert folders() == 3
    os.utime(corpus / "001.txt", ns=(0, 0))
    build()
    assert folders() == 4


def truncate(path):
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_damaged_corpus_is_told_in_one_line_and_built_anew_once_it_is_removed(damage, build, expected, tmp_path):
    build()
    (path,) = (tmp_path / "cache").rglob("*.arrow")
    damage(path)
    with pytest.raises(ValueError, match=r"cannot be read \(.*\): remove it, and its text is tokenized again"):
        build()
    shutil.rmtree(path.parent)
    assert tokens_of(build()) == expected.tolist()


class SlowSource(TextSource):
    """Reads a document every few milliseconds, so that there is a moment to kill the reader in."""

    def read(self, rows):
        for text in super().read(rows):
            time.sleep(0.005)
            yield text


def build_slowly(corpus, tokenizer, folder, tokenize_num_proc):
    from dmc.data import cache

    os.setpgrp()
    cache._JOB_BYTES = 100
    build_packed(SlowSource(corpus), tokenizer, LENGTH, folder, tokenize_num_proc=tokenize_num_proc)


@pytest.mark.parametrize("tokenize_num_proc", [1, 2])
def test_killed_build_leaves_nothing_in_the_way_of_the_next(
    tokenize_num_proc, expected, corpus, tmp_path, tokenizer, monkeypatch
):
    folder = tmp_path / "cache"
    monkeypatch.setattr("dmc.data.cache._JOB_BYTES", 100)  # as in the killed process: what it finished is taken
    process = CONTEXT.Process(target=build_slowly, args=(str(corpus), tokenizer, folder, tokenize_num_proc))
    process.start()
    while not list(folder.glob(".*.partial/*")):
        assert process.is_alive()
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert [path for path in folder.iterdir() if not path.name.startswith(".")] == []
    packed = build_packed(SlowSource(str(corpus)), tokenizer, LENGTH, folder, tokenize_num_proc=1)
    assert tokens_of(packed) == expected.tolist()
    assert not list(folder.glob(".*.partial"))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # workers of the killed one would wait for ever


def test_builders_at_the_same_time_agree_and_one_of_them_builds(corpus, tmp_path, tokenizer, build, expected):
    arguments = (str(corpus), tokenizer, tmp_path / "shared", 1)
    processes = [CONTEXT.Process(target=build_slowly, args=arguments) for _ in range(2)]
    threads = [threading.Thread(target=build, args=("shared",)) for _ in range(2)]
    for builder in (*processes, *threads):
        builder.start()
    for builder in (*processes, *threads):
        builder.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert len([path for path in (tmp_path / "shared").iterdir() if path.is_dir()]) == 1
    assert tokens_of(build("shared")) == expected.tolist()


class DeadlySource(TextSource):
    """Kills the process that reads, as the kernel does when memory runs out."""

    def read(self, rows):
        for text in super().read(rows):
            if multiprocess.parent_process() is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            yield text


def test_killed_worker_is_an_error_that_says_what_to_do(corpus, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("dmc.data.cache._JOB_BYTES", 100)
    with pytest.raises(ChildProcessError, match=r"was killed.*lower data\.tokenize_num_proc=2"):
        build_packed(DeadlySource(str(corpus)), tokenizer, LENGTH, tmp_path / "cache", tokenize_num_proc=2)


@pytest.mark.parametrize("tokenize_num_proc", [1, 2])
def test_text_that_breaks_off_is_told_as_it_is(tokenize_num_proc, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("dmc.data.cache._JOB_BYTES", 100)
    monkeypatch.setattr("dmc.data.sources.JSON_LINES_SHARD", 1000)
    lines = ['{"text": "some words"}'] * 200
    for last, error in (('{"text": 3}', "holds int, expected text"), ('{"text": ', "cannot be read as json")):
        (tmp_path / "a.jsonl").write_text("\n".join([*lines, last]))
        with pytest.raises((ValueError, TypeError), match=error):
            build_packed(
                TextSource(str(tmp_path / "a.jsonl")), tokenizer, 2, tmp_path, tokenize_num_proc=tokenize_num_proc
            )
        assert not list(tmp_path.rglob("dataset_info.json"))


def test_skipped_documents_are_counted_and_reported_once(corpus, build, caplog):
    (corpus / "900.txt").write_bytes(b"\xff\xfe\x00broken")
    (corpus / "901.txt").write_bytes(b"")
    (corpus / "902.txt").write_bytes(b" \n\n")
    for _ in range(2):
        packed = build()
        assert (packed.tokens.num_documents, packed.tokens.num_skipped) == (40, 3)
    (record,) = caplog.records
    assert "skipped 3 documents without text or not in utf-8, kept 40" in record.getMessage()


@pytest.mark.parametrize("odd", ['{"text": ""}', '{"text": null}', '{"other": 1}', '{"text": "half \\ud800"}'])
def test_rows_without_text_are_counted_skips(odd, tmp_path, tokenizer):
    lines = [odd] * 50 + ['{"text": "some words here"}'] + [odd] * 50
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for _ in range(2):
        packed = build_packed(TextSource(str(tmp_path / "a.jsonl")), tokenizer, 2, tmp_path / "cache")
        assert (packed.tokens.num_documents, packed.tokens.num_skipped) == (1, 100)
        assert tokenizer.decode(tokens_of(packed)[:-1]) == "some words here"


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xff"])
def test_corpus_without_text_is_refused_before_anything_is_written(content, tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"is empty: (no document holds text|its files have no bytes)"):
        build_packed(TextSource(str(tmp_path / "a.txt")), tokenizer, LENGTH, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_wrong_arguments_are_refused_before_anything_is_written(corpus, tmp_path, tokenizer):
    source, cache = TextSource(str(corpus)), tmp_path / "cache"
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(FileNotFoundError, match=r"missing\.txt"):  # every source is checked before the first is built
        build_packed([source, TextSource(str(tmp_path / "missing.txt"))], tokenizer, LENGTH, cache)
    with pytest.raises(ValueError, match="no eos token"):
        build_packed(source, bare, LENGTH, cache)
    assert not cache.exists()
    with pytest.raises(ValueError, match="fewer than one sequence"):
        build_packed(source, tokenizer, 10**6, cache)
