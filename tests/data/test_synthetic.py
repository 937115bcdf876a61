import pytest
import torch

from dmc.data import RecallSequences
from dmc.data.synthetic import MARK_ID, NUM_MARKERS, QUERY_ID


@pytest.mark.parametrize("task", ["copy", "needle", "key_value"])
@pytest.mark.parametrize("answer_length", [1, 4])
def test_answer_repeats_its_source(task: str, answer_length: int) -> None:
    dataset = RecallSequences(
        task, num_sequences=50, sequence_length=64, vocab_size=100, answer_length=answer_length, seed=1
    )
    assert len(dataset) == 50
    sources = set()
    for index in range(50):
        item = dataset[index]
        tokens, source, answer = item["input_ids"], item["source_start"], item["answer_start"]
        assert tokens.shape == (64,) and tokens.dtype == torch.int64
        assert item["index"] == index and answer == 64 - answer_length
        assert torch.equal(tokens[answer:], tokens[source : source + answer_length])
        assert source + answer_length <= answer - 1
        assert (tokens == QUERY_ID).sum() == 1
        sources.add(source)
        if task == "key_value":
            marks = (tokens == MARK_ID).nonzero().flatten()
            keys = tokens[marks + 1]
            assert len(keys.unique()) == len(keys) == 64 // (2 + answer_length) - 1
            assert tokens[answer - 2] == QUERY_ID and tokens[answer - 1] == tokens[source - 1]
        else:
            assert tokens[source - 1] == MARK_ID and tokens[answer - 1] == QUERY_ID
            assert (tokens == MARK_ID).sum() == 1
        assert tokens[answer:].min() >= NUM_MARKERS
    assert (sources == {1}) if task == "copy" else (len(sources) > 5)


def test_item_depends_on_seed_and_index_alone() -> None:
    def item(seed: int, index: int) -> torch.Tensor:
        options = {"num_sequences": 9, "sequence_length": 32, "vocab_size": 50, "seed": seed}
        return RecallSequences("needle", **options)[index]["input_ids"]

    assert torch.equal(item(0, 3), item(0, 3))
    assert not torch.equal(item(0, 3), item(0, 4))
    assert not torch.equal(item(0, 3), item(1, 3))


@pytest.mark.parametrize("task", ["copy", "needle", "key_value"])
def test_shortest_sequence_holds_the_task(task: str) -> None:
    shortest = 2 * (1 + 4 + (task == "key_value"))
    options = {"num_sequences": 5, "vocab_size": 30}
    item = RecallSequences(task, sequence_length=shortest, **options)[0]
    assert item["source_start"] == 1 + (task == "key_value")
    with pytest.raises(ValueError, match=f"sequence_length >= {shortest}"):
        RecallSequences(task, sequence_length=shortest - 1, **options)


def test_errors_name_the_value_and_the_remedy() -> None:
    options = {"num_sequences": 5, "sequence_length": 64, "vocab_size": 30}
    with pytest.raises(ValueError, match="task='sort' is unknown"):
        RecallSequences("sort", **options)
    with pytest.raises(ValueError, match="vocab_size=5 is too small for 'key_value'; it needs at least 11"):
        RecallSequences("key_value", **(options | {"vocab_size": 5}))
    with pytest.raises(IndexError, match="index=5"):
        RecallSequences("copy", **options)[5]
