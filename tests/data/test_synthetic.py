import pytest

from dmc.data import RecallSequences
from dmc.data.synthetic import MARK_ID, NUM_MARKERS, QUERY_ID


@pytest.mark.parametrize("task", ["copy", "needle", "key_value"])
@pytest.mark.parametrize("answer_length", [1, 4])
def test_answer_repeats_its_source(task: str, answer_length: int) -> None:
    sequences = RecallSequences(task, sequence_length=64, vocab_size=100, answer_length=answer_length, seed=1)
    sources = set()
    for index in range(50):
        tokens, answer, source = sequences[index]
        assert len(tokens) == 64 and answer == 64 - answer_length
        assert tokens[answer:] == tokens[source : source + answer_length] and source + answer_length <= answer - 1
        assert tokens.count(QUERY_ID) == 1 and min(tokens[answer:]) >= NUM_MARKERS
        sources.add(source)
        if task == "key_value":
            keys = [tokens[place + 1] for place, token in enumerate(tokens) if token == MARK_ID]
            assert len({*keys}) == len(keys) == 64 // (2 + answer_length) - 1
            assert tokens[answer - 2] == QUERY_ID and tokens[answer - 1] == tokens[source - 1]
        else:
            assert tokens[source - 1] == MARK_ID and tokens[answer - 1] == QUERY_ID and tokens.count(MARK_ID) == 1
    assert (sources == {1}) if task == "copy" else (len(sources) > 5)
    others = (sequences[0], sequences[1], RecallSequences(task, 64, 100, answer_length, seed=2)[0])
    assert sequences[0] == others[0] and len({tuple(each.tokens) for each in others}) == 3


@pytest.mark.parametrize("task", ["copy", "needle", "key_value"])
def test_shortest_sequence_holds_the_task(task: str) -> None:
    shortest = 2 * (1 + 4 + (task == "key_value"))
    assert RecallSequences(task, shortest, 30)[0].source_start == 1 + (task == "key_value")
    with pytest.raises(ValueError, match=f"sequence_length >= {shortest}"):
        RecallSequences(task, shortest - 1, 30)


def test_errors_name_the_value_and_the_remedy() -> None:
    with pytest.raises(ValueError, match="task='sort' is unknown"):
        RecallSequences("sort", 64, 30)
    with pytest.raises(ValueError, match="vocab_size=5 is too small for 'key_value'; it needs at least 11"):
        RecallSequences("key_value", 64, 5)
