import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch

from dmc.data import PackedTokens
from dmc.data.packing import TokenArrays, TokenTable


class Opening:
    """Opens documents that it knows by their lengths alone, in several chunks."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __call__(self):
        ends = np.cumsum([length for documents in self.lengths for length in documents], dtype=np.int64)
        parts = np.split(
            np.arange(ends[-1]).astype(np.uint16),
            np.cumsum([sum(lengths_of_one) for lengths_of_one in self.lengths])[:-1],
        )
        scored = pa.chunked_array([(part % 3 > 0).astype(np.uint8) for part in parts])
        return TokenArrays(pa.chunked_array(parts), ends, scored)


LENGTHS = [[[500]], [[1], [499]], [[0, 3], [], [0], [4, 0, 240], [3, 250, 0]], [[7]] * 71 + [[3]], [[1] * 500]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=range(5))
def test_every_window_equals_that_of_the_flat_arrays(lengths):
    table = TokenTable(Opening(lengths))
    starts = np.zeros(501, dtype=bool)
    starts[np.cumsum([0, *(length for documents in lengths for length in documents)])] = True
    assert len(table) == 500
    assert table.num_documents == starts[:-1].sum()
    assert table.num_skipped == sum(documents.count(0) for documents in lengths)
    for first, last in np.sort(np.random.default_rng(1).integers(0, 501, (300, 2))).tolist():
        window = table.window(first, last)
        assert window.token_ids.tolist() == list(range(first, last))
        assert window.scored.tolist() == [number % 3 > 0 for number in range(first, last)]
        assert window.starts.tolist() == [number == first or bool(starts[number]) for number in range(first, last)]


def test_items_carry_what_is_asked_for_and_pickling_copies_no_token():
    packed = PackedTokens(TokenTable(Opening([[20, 5], [25]])), 10, loss_mask=True, document_starts=True)
    items = [packed[index] for index in range(len(packed))]
    assert torch.cat([item["input_ids"] for item in items]).tolist() == list(range(50))
    assert [item["index"] for item in items] == list(range(5)) and items[0]["input_ids"].dtype == torch.int64
    assert [item["document_starts"].nonzero().flatten().tolist() for item in items] == [[0], [0], [0, 5], [0], [0]]
    assert items[1]["loss_mask"].tolist() == [number % 3 > 0 for number in range(10, 20)]
    content = pickle.dumps(packed)
    assert len(content) < 1000
    assert pickle.loads(content)[2]["input_ids"].tolist() == list(range(20, 30))


def test_errors_name_the_value_and_the_remedy():
    table = TokenTable(Opening([[4]]))
    with pytest.raises(ValueError, match=r"4 tokens, fewer than one sequence.*sequence_length=5"):
        PackedTokens(table, 5)
    with pytest.raises(ValueError, match="sequence_length=0: expected a whole number >= 1"):
        PackedTokens(table, 0)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            PackedTokens(table, 2)[index]


@pytest.mark.parametrize("lengths", [*LENGTHS, [[4, 3, 0], [3, 9, 25, 10, 1], [10]]], ids=range(6))
def test_sequences_of_whole_documents_are_filled_up(lengths):
    documents, first = [], 0
    for length in (length for documents_of_one in lengths for length in documents_of_one):
        documents += [list(range(first, first + length))] * bool(length)
        first += length
    expected = [[]]
    for document in documents:
        if expected[-1] and len(expected[-1]) + len(document) > 10:
            expected.append([])
        expected[-1] += document[:10]
    table = TokenTable(Opening(lengths))
    packed = PackedTokens(table, 10, document_starts=True, whole_documents=True)
    assert len(packed) == len(expected)
    assert packed.num_cut == sum(max(len(document) - 10, 0) for document in documents)
    begins = {document[0] for document in documents}
    for item, tokens in zip((packed[index] for index in range(len(packed))), expected, strict=True):
        added = 10 - len(tokens)
        assert item["input_ids"].tolist() == tokens + tokens[-1:] * added
        assert item["loss_mask"].tolist() == [token % 3 > 0 for token in tokens] + [False] * added
        starts = [token in begins for token in tokens] + [place == 0 for place in range(added)]
        assert item["document_starts"].tolist() == starts
        assert item["token_mask"].tolist() == [True] * len(tokens) + [False] * added
        assert packed.document_of(item["index"], 0) == table.document_at(tokens[0])
