import copy
import itertools
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerFast

from dmc.data import StreamingPacked, TextSource, open_stream, pack_documents
from dmc.data.tokenizer import encode_documents

LENGTH = 16


@pytest.fixture
def jsonl(corpus: Path, tmp_path: Path) -> Path:
    """Return a folder of three json files that hold the corpus, one document per line."""
    folder = tmp_path / "jsonl"
    folder.mkdir()
    texts = [path.read_text() for path in sorted(corpus.iterdir())]
    for shard in range(3):
        lines = [json.dumps({"text": text, "number": number}) for number, text in enumerate(texts)][shard::3]
        (folder / f"{shard}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def parquet(jsonl: Path, tmp_path: Path) -> Path:
    """Return a folder of three parquet files that hold the corpus, one document per row."""
    folder = tmp_path / "parquet"
    folder.mkdir()
    for path in jsonl.iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{path.stem}.parquet")
    return folder


def flatten(batches: list[dict[str, torch.Tensor]]) -> list[tuple[Any, ...]]:
    return [
        (tuple(ids.tolist()), int(index), int(position))
        for batch in batches
        for ids, index, position in zip(batch["input_ids"], batch["index"], batch["position"], strict=True)
    ]


def test_stream_yields_the_packed_corpus(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [path.read_text() for path in sorted(corpus.iterdir())]
    packed = pack_documents(encode_documents(tokenizer, texts), tokenizer.eos_token_id)
    stream = StreamingPacked(TextSource(str(corpus)).stream(), tokenizer, LENGTH)
    for _ in range(2):  # the second iteration begins again
        items = list(stream)
        assert torch.cat([item["input_ids"] for item in items]).tolist() == packed[: len(items) * LENGTH].tolist()
        assert len(items) == len(packed) // LENGTH
        assert [item["index"] for item in items] == [item["position"] for item in items] == list(range(len(items)))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["corpus", "jsonl", "parquet", "blend"])
def test_resumed_stream_equals_the_uninterrupted_one(
    kind: str, num_workers: int, request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast
) -> None:
    names = ["corpus", "jsonl"] if kind == "blend" else [kind]
    folders = [str(request.getfixturevalue(name)) for name in names]

    def loader() -> StatefulDataLoader:
        sources = [TextSource(folder, weight=1 + number) for number, folder in enumerate(folders)]
        stream = StreamingPacked(open_stream(sources, seed=1), tokenizer, LENGTH)
        return StatefulDataLoader(stream, batch_size=3, num_workers=num_workers)

    whole = list(loader())
    assert len(whole) > 20
    for num_batches in (1, 7, 18) if num_workers == 0 else (7,):
        interrupted = loader()
        iterator = iter(interrupted)
        for expected in whole[:num_batches]:
            assert torch.equal(next(iterator)["input_ids"], expected["input_ids"])
        state = copy.deepcopy(interrupted.state_dict())
        del iterator, interrupted

        resumed = loader()
        resumed.load_state_dict(state)
        assert flatten(list(resumed)) == flatten(whole[num_batches:])


def test_state_after_every_sequence_resumes_exactly(jsonl: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    stream = StreamingPacked(open_stream([TextSource(str(jsonl))]), tokenizer, LENGTH)
    whole, states = [], [stream.state_dict()]
    for item in stream:
        whole.append(item["input_ids"])
        states.append(stream.state_dict())
    assert all(len(state["remainder"]) < LENGTH for state in states)
    for start in range(0, len(states), 5):
        stream.load_state_dict(states[start])
        assert stream.state_dict() == states[start]
        rest = [item["input_ids"] for item in stream]
        assert len(rest) == len(whole) - start
        assert all(map(torch.equal, rest, whole[start:]))


def test_repeated_stream_resumes_in_its_second_round(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    stream = StreamingPacked(open_stream([TextSource(str(corpus))], repeat=True), tokenizer, LENGTH)
    num_in_round = len(list(StreamingPacked(TextSource(str(corpus)).stream(), tokenizer, LENGTH)))
    whole = [item["input_ids"] for item in itertools.islice(stream, 3 * num_in_round)]
    for start in (num_in_round // 2, num_in_round + 30, 2 * num_in_round + 1):
        list(itertools.islice(stream, start))
        stream.load_state_dict(stream.state_dict())
        rest = [item["input_ids"] for item in itertools.islice(stream, 20)]
        assert all(map(torch.equal, rest, whole[start:]))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["corpus", "jsonl"])
def test_ranks_and_workers_share_the_documents_and_never_a_position(
    kind: str, world_size: int, num_workers: int, request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = request.getfixturevalue(kind)
    source = TextSource(str(folder))
    items: list[tuple[Any, ...]] = []
    for rank in range(world_size):
        stream = StreamingPacked(source.stream(), tokenizer, 1, rank=rank, world_size=world_size)
        items += flatten(list(StatefulDataLoader(stream, batch_size=50, num_workers=num_workers)))
    texts = [path.read_text() for path in sorted(request.getfixturevalue("corpus").iterdir())]
    packed = pack_documents(encode_documents(tokenizer, texts), tokenizer.eos_token_id)
    assert sorted(token for (token,), _, _ in items) == sorted(packed.tolist())
    assert len({position for _, _, position in items}) == len(items)


def test_blend_of_streams_follows_the_weights(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for letter in "xy":
        (tmp_path / f"{letter}.txt").write_text(f"{letter}\n")
    sources = [TextSource(str(tmp_path / "x.txt"), weight=3), TextSource(str(tmp_path / "y.txt"), weight=1)]
    rows = itertools.islice(open_stream(sources, seed=0, repeat=True), 2000)
    assert abs(sum(row["text"] == "x\n" for row in rows) / 2000 - 0.75) < 0.03


def test_empty_documents_are_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = datasets.IterableDataset.from_generator(
        lambda: iter([{"text": "a b"}, {"text": " "}, {"text": None}] * 20)
    )
    packed = StreamingPacked(stream, tokenizer, 2)
    assert len(list(packed)) > 0
    assert packed.num_skipped == 40


def test_length_is_the_draws_of_a_rank(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    stream = TextSource(str(corpus)).stream()
    assert len(StreamingPacked(stream, tokenizer, LENGTH, rank=1, world_size=4, num_draws=101)) == 25
    with pytest.raises(TypeError, match="pass num_draws"):
        len(StreamingPacked(stream, tokenizer, LENGTH))


def test_errors_name_the_value_and_the_remedy(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    stream = TextSource(str(corpus)).stream()
    with pytest.raises(ValueError, match="sequence_length=0"):
        StreamingPacked(stream, tokenizer, 0)
    with pytest.raises(ValueError, match="rank=3"):
        StreamingPacked(stream, tokenizer, LENGTH, rank=3, world_size=3)
    known = datasets.Dataset.from_dict({"content": ["a"], "number": [1]}).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"no column 'text'; it has \['content', 'number'\]"):
        StreamingPacked(known, tokenizer, LENGTH)
    with pytest.raises(ValueError, match="no column 'content'"):
        list(StreamingPacked(stream, tokenizer, LENGTH, column="content"))
    with pytest.raises(TypeError, match="'number' holds int"):
        list(StreamingPacked(known, tokenizer, LENGTH, column="number"))
    bare = copy.deepcopy(tokenizer)
    bare.eos_token = None
    with pytest.raises(ValueError, match="no eos token"):
        StreamingPacked(stream, bare, LENGTH)


def test_state_of_another_rank_is_refused(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    first, second = (
        StreamingPacked(TextSource(str(corpus)).stream(), tokenizer, LENGTH, rank=rank, world_size=2)
        for rank in range(2)
    )
    with pytest.raises(ValueError, match="rank 0 of 2, this is rank 1 of 2"):
        second.load_state_dict(first.state_dict())
