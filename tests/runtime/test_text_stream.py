import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dmc import Engine, SamplingParams
from dmc.runtime.text_stream import TextStream

TEXT = "Füße, naïve 日本語 and 😀👍🏽 — the quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def byte_level():
    """Every byte is a token, and some longer pieces: most characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def byte_fallback():
    """Like Llama 2's: pieces that begin with a space mark, the first one loses it; unknown characters as bytes."""
    letters = ["a", "b", ".", "▁", "▁a", "▁b", "<s>"]
    vocabulary = {piece: index for index, piece in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("▁", "b")], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


class Letters:
    """One token for each character."""

    def decode(self, tokens, skip_special_tokens):
        return "".join(map(chr, tokens))


class Counting(Letters):
    """Counts what it is asked."""

    num_calls = 0

    def decode(self, tokens, skip_special_tokens):
        self.num_calls += 1
        return super().decode([token + 33 for token in tokens], skip_special_tokens)


def pieces(stream, tokens):
    found = []
    for token in tokens:
        found.append(stream.push(token))
        if stream.stopped:
            break
    return [*found, stream.finish()]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_pieces_are_whole_characters_and_make_up_the_text(name, request):
    tokenizer = request.getfixturevalue(name)
    text = TEXT if name == "byte_level" else "a b. é😀 ab 日 a"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) > len(text.split())
    found = pieces(TextStream(tokenizer), tokens)
    assert "".join(found) == tokenizer.decode(tokens) == text
    assert not any("\ufffd" in piece for piece in found)
    assert found[-1] == ""
    assert any(not piece for piece in found[:-1])  # some character took several tokens


def test_any_tokens_make_up_what_the_tokenizer_decodes(byte_level):
    """Random bytes too: what is no character comes out as the tokenizer writes it, at the latest in the end."""
    draw = random.Random(0)
    for _ in range(200):
        tokens = [draw.randrange(len(byte_level)) for _ in range(draw.randrange(1, 25))]
        found = pieces(TextStream(byte_level), tokens)
        assert "".join(found) == byte_level.decode(tokens, skip_special_tokens=True)


def test_half_a_character_waits_for_its_other_half_or_the_end(byte_level):
    smile = byte_level("😀", add_special_tokens=False)["input_ids"]
    assert len(smile) > 1
    stream = TextStream(byte_level)
    assert [stream.push(token) for token in smile[:-1]] == [""] * (len(smile) - 1)
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("four",), "one two three"),
        ("ababab", ("abb", "bb"), "ababab"),
        ("aab", ("ab",), "a"),
        ("abcabd", ("abd",), "abc"),
        ("abc", ("cd", "bc"), "a"),
        ("stop at once", ("s",), ""),
        ("ends with sto", ("stop",), "ends with sto"),
        ("aaaa", ("aaa",), ""),
    ],
)
def test_text_ends_before_a_stop_string(text, stop, expected):
    stream = TextStream(Letters(), stop)
    found = pieces(stream, [ord(letter) for letter in text])
    assert "".join(found) == "".join(stream.pieces) == expected
    assert stream.stopped == any(end in text for end in stop)


def test_random_texts_stop_where_a_search_of_the_whole_text_says():
    draw = random.Random(1)
    for _ in range(500):
        text = "".join(draw.choices("ab", k=draw.randrange(1, 14)))
        stop = tuple("".join(draw.choices("ab", k=draw.randrange(1, 5))) for _ in range(draw.randrange(1, 3)))
        ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(ending) for ending in stop)]
        expected = text
        if ends:
            first = text[: ends[0]]
            expected = first[: min(first.find(end) for end in stop if end in first)]
        stream = TextStream(Letters(), stop)
        seen = ""
        for piece in pieces(stream, [ord(letter) for letter in text]):
            seen += piece
            assert expected.startswith(seen)  # nothing is taken back
        assert seen == expected


def test_what_cannot_begin_a_stop_string_is_not_held_back():
    stream = TextStream(Letters(), ("<end>",))
    assert [stream.push(ord(letter)) for letter in "a<eb"] == ["a", "", "", "<eb"]


def test_text_is_decoded_where_it_is_asked_for_in_any_order(make_stock, make_prompts):
    tokenizer = Counting()
    engine = Engine(make_stock(), tokenizer)
    params = SamplingParams(max_new_tokens=9, temperature=0, n=2)
    request, events = engine.submit(*make_prompts(5), params), []
    while request.generation is None:
        events += engine.step()
    assert tokenizer.num_calls == 3  # the prompt, and each continuation at its end
    texts = {(event.number, event.index): event.text for event in reversed(events)}
    for number, each in enumerate((request.generation, *request.generation.alternatives)):
        assert "".join(texts[number, index] for index in range(9)) == each.text
        assert all(event.text == texts[event.number, event.index] for event in events)
