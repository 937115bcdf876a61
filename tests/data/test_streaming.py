import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from dmc.data import StreamLoader, TextSource
from dmc.data.order import blend_schedule
from dmc.data.streaming import check_stream, open_stream_shards

LENGTH = 16
NUM_SHARDS = 12
NUM_DRAWS = 96

Samples = dict[int, list[int]]


@pytest.fixture
def folders(corpus: Path, tmp_path: Path) -> dict[str, Path]:
    """Return the corpus as 40 texts, 3 json files and 3 parquet files of 4 row groups or more."""
    texts = [path.read_text() for path in sorted(corpus.iterdir())]
    found = {"text": corpus, "jsonl": tmp_path / "jsonl", "parquet": tmp_path / "parquet"}
    for name in ("jsonl", "parquet"):
        found[name].mkdir()
        for shard in range(3):
            rows = [{"text": text, "number": number} for number, text in enumerate(texts)][shard::3]
            if name == "jsonl":
                (found[name] / f"{shard}.jsonl").write_text("\n".join(map(json.dumps, rows)))
            else:
                datasets.Dataset.from_list(rows).to_parquet(found[name] / f"{shard}.parquet", batch_size=3)
    return found


def sources_of(kind: str, folders: dict[str, Path]) -> list[TextSource]:
    names = list(folders) if kind == "blend" else [kind]
    return [TextSource(str(folders[name]), weight=1 + number) for number, name in enumerate(names)]


@pytest.fixture
def make_loader(folders: dict[str, Path], tokenizer: PreTrainedTokenizerFast) -> Any:
    def make(kind: str = "blend", **options: Any) -> StreamLoader:
        options = {"num_stream_shards": NUM_SHARDS, "batch_size": 2, "num_draws": NUM_DRAWS, **options}
        return StreamLoader(sources_of(kind, folders), tokenizer, LENGTH, **options)

    return make


def samples_of(batches: Iterator[dict[str, torch.Tensor]]) -> Samples:
    drawn: Samples = {}
    for batch in batches:
        for position, sequence in zip(batch["position"].tolist(), batch["input_ids"].tolist(), strict=True):
            assert position not in drawn
            drawn[position] = sequence
    return drawn


def naive_sequences(rows: Iterator[dict[str, Any]], tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    """Join documents in one long list and cut it."""
    texts = [row["text"] for row in itertools.islice(rows, 30)]
    flat = [token for text in texts for token in [*tokenizer.encode(text), tokenizer.eos_token_id]]
    return (flat[start : start + LENGTH] for start in range(0, len(flat) - LENGTH, LENGTH))


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "blend"])
def test_sample_is_the_next_sequence_of_its_shard_and_source(
    kind: str, make_loader: Any, folders: dict[str, Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    drawn = samples_of(make_loader(kind))
    assert sorted(drawn) == list(range(NUM_DRAWS))
    sources = sources_of(kind, folders)
    schedule = blend_schedule([source.weight for source in sources], 0).tolist()
    for shard, streams in enumerate(open_stream_shards(sources, NUM_SHARDS)):
        waiting = [naive_sequences(iter(stream), tokenizer) for stream in streams]
        turns = itertools.islice(itertools.cycle(schedule), shard * len(schedule) // NUM_SHARDS, None)
        for position in range(shard, NUM_DRAWS, NUM_SHARDS):
            assert drawn[position] == next(waiting[next(turns)])


@pytest.mark.parametrize("num_stream_shards", [1, 2, 12])
@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_shards_are_all_of_the_documents(kind: str, num_stream_shards: int, folders: dict[str, Path]) -> None:
    """Every shard repeats documents of its own, whether it has files, row groups or rows of the stream."""
    shards = open_stream_shards([TextSource(str(folders[kind]))], num_stream_shards)
    rounds = []
    for (stream,) in shards:
        texts = [row["text"] for row in itertools.islice(stream, 2 + 120 // num_stream_shards)]
        once = list(dict.fromkeys(texts))
        assert texts == list(itertools.islice(itertools.cycle(once), len(texts)))
        rounds += once
    texts = sorted(path.read_text() for path in folders["text"].iterdir())
    assert sorted(rounds) == texts


@pytest.mark.parametrize(("world_size", "num_workers"), [(2, 0), (3, 2), pytest.param(6, 3, marks=pytest.mark.slow)])
def test_ranks_and_workers_change_no_sample(world_size: int, num_workers: int, make_loader: Any) -> None:
    expected = samples_of(make_loader())
    drawn: Samples = {}
    for rank in range(world_size):
        loader = make_loader(rank=rank, world_size=world_size, num_workers=num_workers)
        drawn_here = samples_of(loader)
        assert list(drawn_here) == list(range(rank, NUM_DRAWS, world_size))
        assert len(loader) * loader.batch_size == len(drawn_here)
        drawn |= drawn_here
    assert drawn == expected


def merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the ranks' states together, as they do themselves where they can talk to each other."""
    assert len({state["num_drawn"] for state in states}) == 1
    return {**states[0], "shards": {shard: place for state in states for shard, place in state["shards"].items()}}


@pytest.mark.parametrize(
    ("ranks_before", "ranks_after", "workers_before", "workers_after", "num_drawn"),
    [(1, 1, 0, 2, 72), (1, 3, 2, 0, 24), (4, 2, 0, 0, 72), pytest.param(4, 2, 0, 2, 24, marks=pytest.mark.slow)],
)
def test_run_goes_on_at_any_number_of_ranks_and_workers(
    ranks_before: int, ranks_after: int, workers_before: int, workers_after: int, num_drawn: int, make_loader: Any
) -> None:
    uninterrupted = samples_of(make_loader())
    states, drawn = [], {}
    for rank in range(ranks_before):
        loader = make_loader(rank=rank, world_size=ranks_before, num_workers=workers_before)
        batches = iter(loader)
        drawn |= samples_of(itertools.islice(batches, num_drawn // ranks_before // 2))
        states.append(loader.state_dict())
    state = json.loads(json.dumps(merged(states)), object_hook=integer_keys)
    for rank in range(ranks_after):
        loader = make_loader(rank=rank, world_size=ranks_after, num_workers=workers_after)
        loader.load_state_dict(state)
        drawn |= samples_of(loader)
    assert drawn == uninterrupted


def integer_keys(values: dict[str, Any]) -> dict[Any, Any]:
    return {int(key) if key.isdigit() else key: value for key, value in values.items()}


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "blend"])
def test_state_after_every_sequence_resumes_exactly(kind: str, make_loader: Any) -> None:
    options = {"num_stream_shards": 2, "batch_size": 1, "num_draws": 300}  # several rounds of each shard's documents
    loader = make_loader(kind, **options)
    uninterrupted, states = [], []
    for batch in loader:
        uninterrupted.append(batch["input_ids"].tolist())
        states.append(copy.deepcopy(loader.state_dict()))
    places = [place for state in states for shard in state["shards"].values() for place in shard]
    assert all(len(place["remainder"]) < LENGTH for place in places)
    for start in range(0, 260, 26):
        resumed = make_loader(kind, **options)
        resumed.load_state_dict(copy.deepcopy(states[start]))
        assert resumed.state_dict() == states[start]
        drawn = [batch["input_ids"].tolist() for batch in itertools.islice(resumed, 40)]
        assert drawn == uninterrupted[start + 1 : start + 41]


def test_samples_read_ahead_are_drawn_again_after_a_resume(make_loader: Any) -> None:
    loader = make_loader(num_workers=2)
    batches = iter(loader)
    first = samples_of(itertools.islice(batches, 3))
    state = loader.state_dict()
    assert state["num_drawn"] == 6 and sorted(state["shards"]) == list(range(6))  # although the process is further
    second = make_loader()
    second.load_state_dict(state)
    assert first | samples_of(second) == samples_of(make_loader())


def test_errors_name_the_value_and_the_remedy(
    make_loader: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match=r"data\.stream_shards=12 cannot be shared out evenly to 5 ranks"):
        make_loader(world_size=5)
    with pytest.raises(ValueError, match=r"12 shards of the stream, data\.stream_shards is 6"):
        make_loader(num_stream_shards=6).load_state_dict(make_loader().state_dict())
    with pytest.raises(ValueError, match=r"14 samples are drawn, no multiple of world_size=4"):
        make_loader(world_size=4).load_state_dict({"num_drawn": 14, "num_stream_shards": NUM_SHARDS, "shards": {}})
    source = TextSource(str(tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is empty: no document is text"):
        check_stream(source)
    (tmp_path / "a.txt").write_bytes(b"one document")
    with pytest.raises(ValueError, match=r"shard 1 of 2 has no text of a source; lower data\.stream_shards"):
        list(StreamLoader([source], tokenizer, 4, num_stream_shards=2, batch_size=2, num_draws=4))
    (tmp_path / "a.jsonl").write_text('{"text": 1}')
    with pytest.raises(TypeError, match="holds int, expected text"):
        list(
            StreamLoader(
                [TextSource(str(tmp_path / "a.jsonl"))], tokenizer, 4, num_stream_shards=1, batch_size=1, num_draws=4
            )
        )
    bare = copy.deepcopy(tokenizer)
    bare.eos_token = None
    with pytest.raises(ValueError, match="no eos token"):
        StreamLoader([source], bare, 4, num_stream_shards=1, batch_size=1, num_draws=4)


def test_a_shard_of_chats_without_an_answer_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmc.data.streaming.MAX_WITHOUT_TOKENS", 200)
    chats = [[{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}] for _ in range(40)]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    source = TextSource(str(tmp_path / "chats.jsonl"), messages="messages")
    with pytest.raises(ValueError, match="of the role 'assistant'"):
        next(iter(StreamLoader([source], tokenizer, 4, num_stream_shards=2, batch_size=2, num_draws=4)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_in_mid_step_is_that_of_the_step_before(num_workers: int, make_loader: Any) -> None:
    """A step of 6 samples is 3 batches, all read before the first of them is used; its signal comes in between."""
    expected = samples_of(make_loader())
    loader = make_loader(draws_per_step=6, num_workers=num_workers)
    batches = iter(loader)
    for num_done in (0, 6, 12):
        samples_of(itertools.islice(batches, 3))
        state = copy.deepcopy(loader.state_dict(num_done))
        assert state["num_drawn"] == num_done
        assert loader.state_dict() == loader.state_dict(num_done + 6) != state
        resumed = make_loader(draws_per_step=6)
        resumed.load_state_dict(state)
        assert samples_of(resumed) == {position: expected[position] for position in range(num_done, NUM_DRAWS)}
