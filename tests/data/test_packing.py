import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dmc.data import PackedTokens, pack_documents

SEPARATOR = 0


@given(st.lists(st.lists(st.integers(1, 100_000), max_size=20), max_size=20))
def test_documents_come_back_from_the_packed_array(documents: list[list[int]]) -> None:
    packed = pack_documents(documents, SEPARATOR)
    assert len(packed) == sum(len(document) + 1 for document in documents)
    ends = np.flatnonzero(packed == SEPARATOR)
    assert [part[:-1].tolist() for part in np.split(packed, ends + 1)[:-1]] == documents


def test_packed_type_is_the_smallest_that_holds_the_ids() -> None:
    assert pack_documents([[1, 2**16 - 1]], SEPARATOR).dtype == np.uint16
    assert pack_documents([[1, 2**16]], SEPARATOR).dtype == np.int32
    assert pack_documents([[1]], SEPARATOR, np.int32).dtype == np.int32


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_sequences_cut_the_array_without_overlap(dtype: type) -> None:
    tokens = np.arange(50_000, 50_023).astype(dtype)
    dataset = PackedTokens(tokens, 5, num_documents=3, num_skipped=1)
    assert (len(dataset), dataset.num_tokens, dataset.num_documents, dataset.num_skipped) == (4, 23, 3, 1)
    items = [dataset[index] for index in range(len(dataset))]
    assert [item["index"] for item in items] == [0, 1, 2, 3]
    assert all(item["input_ids"].dtype == torch.int64 for item in items)
    assert torch.cat([item["input_ids"] for item in items]).tolist() == list(range(50_000, 50_020))


def test_items_do_not_share_memory_with_the_array() -> None:
    tokens = np.arange(10, dtype=np.int64)
    PackedTokens(tokens, 5)[0]["input_ids"].zero_()
    assert tokens.tolist() == list(range(10))


def test_errors_name_the_value_and_the_remedy() -> None:
    tokens = np.arange(4, dtype=np.uint16)
    with pytest.raises(ValueError, match=r"4 tokens, fewer than one sequence.*sequence_length=5"):
        PackedTokens(tokens, 5)
    with pytest.raises(ValueError, match="sequence_length=0"):
        PackedTokens(tokens, 0)
    with pytest.raises(TypeError, match="float32"):
        PackedTokens(tokens.astype(np.float32), 2)
    with pytest.raises(TypeError, match=r"\[2, 2\]"):
        PackedTokens(tokens.reshape(2, 2), 2)
    with pytest.raises(ValueError, match="separator_id=-1"):
        pack_documents([[1]], -1)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            PackedTokens(tokens, 2)[index]
