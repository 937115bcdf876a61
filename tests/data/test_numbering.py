"""A tokenizer numbers tokens as a model does, or it is told which one it numbers otherwise."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from dmc.data.numbering import excess_ids, moved_special_token, moved_token, num_ids


def made(numbers, **special):
    """Make a tokenizer with these ids; `special` names tokens of it."""
    tokenizer = Tokenizer(WordLevel(dict(numbers), unk_token=None))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def shuffled(numbers, seed, share):
    """Give some of the tokens each other's ids."""
    chosen = random.Random(seed).sample(sorted(numbers), int(share * len(numbers)))
    others = [numbers[token] for token in chosen[1:] + chosen[:1]]
    return numbers | dict(zip(chosen, others, strict=True))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    size=st.integers(3, 20),
    gap=st.integers(0, 3),
    share=st.sampled_from([0.0, 0.0, 0.2, 1.0]),
    left_out=st.integers(0, 3),
    added=st.integers(0, 3),
    renamed=st.sampled_from([None, None, "word1", "<reserved>"]),
    words=st.integers(1, 40),
    seed=st.integers(0, 10**6),
)
def test_made_tokenizers_fit_where_each_id_is_the_same_word(size, gap, share, left_out, added, renamed, words, seed):
    own = {"<end>": 0, "<reserved>": 1} | {f"word{i}": 2 + i + (gap if i > 1 else 0) for i in range(size)}
    other = shuffled(own, seed, share)
    for token in [f"word{size - 1 - i}" for i in range(min(left_out, size - 2))]:
        del other[token]
    first_free = max(own.values()) + 1
    other |= {f"new{i}": first_free + i for i in range(added)}
    if renamed in other:
        other["renamed"] = other.pop(renamed)
    tokens = made(other, eos_token="<end>")
    models = made(own, eos_token="<end>", extra_special_tokens=["<reserved>"])

    # By hand: each text of one tokenizer is read as the same words by the other, apart from what was reserved.
    read_otherwise = any(token in own and own[token] != number for token, number in other.items())
    for token, number in own.items():
        if number > 1 and any(theirs == number and name != token for name, theirs in other.items()):
            read_otherwise = True
    assert (moved_token(tokens, models) is not None) == read_otherwise
    largest = max(other.values())
    assert num_ids(tokens) == largest + 1
    assert (excess_ids(tokens, words) is not None) == (largest >= words)
    assert excess_ids(tokens, None) is None


WORDS = {"<|endoftext|>": 0, "<|im_end|>": 1, "<s>": 2, "<pad>": 3, "a": 4, "b": 5}
ALL = {"extra_special_tokens": ["<|endoftext|>", "<|im_end|>", "<s>", "<pad>"]}


@pytest.mark.parametrize(
    ("special", "config", "role"),
    [
        ({"eos_token": "<|endoftext|>"}, {"eos_token_id": 0}, None),
        ({"eos_token": "<|endoftext|>"}, {}, None),
        ({"eos_token": "<|endoftext|>"}, {"eos_token_id": None, "pad_token_id": -1}, None),
        ({"eos_token": "<|im_end|>"}, {"eos_token_id": 0}, None),  # a base with the tokenizer of its chats
        ({"eos_token": "<|im_end|>"}, {"eos_token_id": [5, 1]}, None),
        ({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, {"bos_token_id": 0, "pad_token_id": 0}, None),
        ({"eos_token": "<|endoftext|>"}, {"eos_token_id": 4}, "eos"),
        ({"eos_token": "<|endoftext|>"}, {"eos_token_id": [4, 5]}, "eos"),
        ({"eos_token": "<|endoftext|>"}, {"eos_token_id": 9}, "eos"),
        ({"eos_token": "<|endoftext|>"}, {"eos_token_id": 3}, "eos"),
        ({"eos_token": "<|endoftext|>", "bos_token": "<s>"}, {"bos_token_id": 2}, None),
        ({"eos_token": "<|endoftext|>", "bos_token": "<s>"}, {"bos_token_id": 3}, "bos"),
        ({"eos_token": "<|endoftext|>"}, {"bos_token_id": 4}, "bos"),
        ({"eos_token": "<|endoftext|>"}, {"pad_token_id": 3}, None),
        ({"eos_token": "<|endoftext|>"}, {"pad_token_id": 5}, "pad"),
    ],
)
def test_special_tokens_of_a_configuration_are_special_in_the_tokenizer(special, config, role):
    found = moved_special_token(made(WORDS, **special, **ALL), SimpleNamespace(**config))
    assert found is None if role is None else f"{role}_token_id=" in found
