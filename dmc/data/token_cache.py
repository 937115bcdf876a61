"""Sources tokenised once into shards on disk, by any number of processes, on from where a killed build stopped.

A shard appears under its name when it is whole, its record after it, and the index of the folder last. So a kill loses
the shards in work and nothing else, and builders of the same folder on several machines share the work: each begins
elsewhere and takes over what others have finished. The bytes do not depend on any of this.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import uuid
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from dmc.data.packing import pack_documents, token_dtype
from dmc.data.token_shards import INDEX_NAME, ShardIndex, ShardRecord, damage_of, is_whole, shard_path
from dmc.data.tokenizer import Framing, encode_documents, framing_of

logger = logging.getLogger(__name__)

SHARD_BYTES = 2**26  # of the source; what a kill can cost each process
_BATCH_CHARACTERS = 2**22  # text encoded at once


class DocumentSource(Protocol):
    """Where documents come from; `TextSource` and `StandardLibrarySource` are two. It is pickled to other processes."""

    label: str
    """A few letters for messages and file names."""
    weight: float
    """Share in a blend, relative to the other sources, > 0."""

    def check(self) -> None:
        """Raise a clear error if the documents cannot be read; write nothing."""

    def description(self) -> dict[str, Any]:
        """Return what identifies the documents (specification, file sizes and times), for the cache key."""

    def num_bytes(self) -> int:
        """Return about how large the documents are; the same for the same description."""

    def documents(self, shard: int = 0, num_shards: int = 1) -> Iterator[str | None]:
        """Yield each document's text, None for one that cannot be decoded; always in the same order.

        The shards 0 .. num_shards - 1 one behind the other are the documents of shard 0 of 1.
        """


@dataclass(frozen=True)
class Build:
    """Everything that a process needs to make any shard of a folder."""

    source: DocumentSource
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    key: str
    """Hash of the source's description, of the tokenizer and of the framing."""
    num_shards: int
    framing: Framing

    @property
    def dtype(self) -> np.dtype:
        """Stored type of a token id."""
        largest = max((*self.framing.begin, self.framing.end))
        return token_dtype(max(len(self.tokenizer), largest + 1))

    def finish(self, shard: int) -> tuple[ShardRecord, str | None]:
        """Return the shard's record and what was wrong with the files that were there; write them if need be."""
        path = shard_path(self.folder, shard)
        record, problem = self._read(path)
        if record is None:
            record = self._write(shard, path)
        return record, problem

    def _read(self, path: Path) -> tuple[ShardRecord | None, str | None]:
        sidecar = path.with_suffix(".json")
        if not (path.exists() or sidecar.exists()):
            return None, None
        try:
            content = json.loads(sidecar.read_text())
            record = ShardRecord(**content["record"])
            if (content["key"], content["num_shards"]) != (self.key, self.num_shards):
                return None, "belongs to another corpus"
            problem = damage_of(path, record)
        except (OSError, ValueError, TypeError, KeyError) as error:
            return None, f"cannot be read ({error})"
        return (None, problem) if problem else (record, None)

    def _write(self, shard: int, path: Path) -> ShardRecord:
        counts = {"num_tokens": 0, "num_documents": 0, "num_empty": 0, "num_undecodable": 0}
        checksum = 0
        temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("wb") as file:
                for tokens in self._tokens(shard, counts):
                    content = tokens.tobytes()
                    file.write(content)
                    checksum = zlib.crc32(content, checksum)
                    counts["num_tokens"] += len(tokens)
                file.flush()
                os.fsync(file.fileno())
            record = ShardRecord(num_bytes=temporary.stat().st_size, checksum=checksum, **counts)
            os.replace(temporary, path)
            content_of_record = {"key": self.key, "num_shards": self.num_shards, "record": asdict(record)}
            _write_whole(path.with_suffix(".json"), json.dumps(content_of_record, indent=1))
        except FileNotFoundError:
            # Another builder finished the folder meanwhile and cleared what it took for a killed builder's leftovers.
            whole, _ = self._read(path)
            if whole is None:
                raise
            return whole
        finally:
            temporary.unlink(missing_ok=True)
        return record

    def _tokens(self, shard: int, counts: dict[str, int]) -> Iterator[np.ndarray]:
        """Yield the shard's packed tokens batch by batch, and count its documents."""
        dtype = self.dtype
        for batch in _batches(_readable(self.source.documents(shard, self.num_shards), counts)):
            documents = [token_ids for token_ids in encode_documents(self.tokenizer, batch) if token_ids]
            counts["num_empty"] += len(batch) - len(documents)
            counts["num_documents"] += len(documents)
            if documents:
                yield pack_documents(documents, self.framing.end, dtype, self.framing.begin)


def open_shards(folder: Path, key: str) -> ShardIndex | None:
    """Return the index of a folder that was built and passes the quick check, else None."""
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    try:
        index = ShardIndex.from_json(path.read_text())
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("Cached tokens %s: the index cannot be read (%s); it is rebuilt.", folder, error)
        return None
    if index.key != key:
        logger.warning("Cached tokens %s: the index belongs to another corpus; it is rebuilt.", folder)
        return None
    return index if is_whole(folder, index) else None


def build_shards(
    source: DocumentSource,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    key: str,
    num_processes: int,
    framing: Framing | None = None,
) -> ShardIndex:
    """Tokenise a source into shards; whole ones that are there are kept, damaged ones replaced with a warning.

    What stands around the documents is the tokenizer's own where `framing` is None.

    Raises:
        ValueError: no document holds text.
        ChildProcessError: a process was killed.
    """
    _require_text(source)
    num_shards = max(1, -(-source.num_bytes() // SHARD_BYTES))
    build = Build(source, tokenizer, folder, key, num_shards, framing or framing_of(tokenizer))
    folder.mkdir(parents=True, exist_ok=True)
    records: dict[int, ShardRecord] = {}
    progress = tqdm(
        _finished(build, num_processes),
        f"tokenising {source.label}",
        build.num_shards,
        unit=" shards",
        mininterval=0.1 if sys.stderr.isatty() else 60,
        disable=build.num_shards == 1 or None,
    )
    for shard, (record, problem) in progress:
        records[shard] = record
        if problem:
            logger.warning("Cached tokens %s: the file %s; it is rebuilt.", shard_path(folder, shard), problem)
    index = ShardIndex(key, build.dtype.name, tuple(records[shard] for shard in range(build.num_shards)))
    _write_whole(folder / INDEX_NAME, index.to_json())
    for leftover in folder.glob("[0-9]*.tmp"):
        leftover.unlink(missing_ok=True)
    return index


def _finished(build: Build, num_processes: int) -> Iterator[tuple[int, tuple[ShardRecord, str | None]]]:
    """Yield (shard, what `Build.finish` returns) of every shard as it is finished."""
    shards = list(range(build.num_shards))
    first = random.SystemRandom().randrange(build.num_shards)  # builders on other machines begin elsewhere
    shards = shards[first:] + shards[:first]
    num_processes = min(num_processes, build.num_shards)
    if num_processes == 1:
        yield from ((shard, build.finish(shard)) for shard in shards)
        return
    # Not forked from here: a fork would inherit torch's and the tokenizer's threads in mid-work, and signal handlers.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(num_processes, context, _start_worker, (build,))
    try:
        futures = {pool.submit(_finish, shard): shard for shard in shards}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            f"A process that tokenised {build.source.label!r} was killed, maybe for want of memory: lower "
            f"data.num_processes={num_processes}. Finished shards are kept in {build.folder}."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_build: Build  # of this worker process, set once: a tokenizer is too large to be sent with every shard


def _start_worker(build: Build) -> None:
    global _build
    _build = build
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # Slurm warns every process; the parent deals with it
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _finish(shard: int) -> tuple[ShardRecord, str | None]:
    return _build.finish(shard)


def _require_text(source: DocumentSource) -> None:
    num_empty = num_undecodable = 0
    for text in source.documents():
        if text is not None and text.strip():
            return
        num_undecodable += text is None
        num_empty += text is not None
    raise ValueError(
        f"The corpus {source.label!r} is empty: no document holds text ({num_empty} are empty, "
        f"{num_undecodable} are not utf-8). Check its path and column."
    )


def _readable(documents: Iterable[str | None], counts: dict[str, int]) -> Iterator[str]:
    for text in documents:
        if text is None or not _is_unicode(text):
            counts["num_undecodable"] += 1
        elif not text.strip():
            counts["num_empty"] += 1
        else:
            yield text


def _is_unicode(text: str) -> bool:
    """Tell whether tokenizers take a text: json can spell halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_characters = 0
    for text in documents:
        batch.append(text)
        num_characters += len(text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _write_whole(path: Path, text: str) -> None:
    """Write a file that appears under its name when it is on the disk."""
    temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
