"""Log-probabilities as OpenAI writes them: bytes that join to the text, names that differ, offsets into the text."""

import asyncio
import json

import pytest
from conftest import build_stock
from runtime.test_first_space import MARK, bytes_as_letters, made, oracle

from dmc import Engine, SamplingParams
from dmc.serving.answers import LocalService
from dmc.serving.requests import ChatRequest, CompletionRequest
from dmc.serving.token_texts import TokenTexts, byte_letters
from dmc.serving.worker import Worker

KINDS = ("byte level", "llama 2", "unigram", "wordpiece")
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def ask():
    """Return a function that asks a service for an answer, with a tokenizer of a kind; `stream` gives all chunks."""
    workers = []

    def start(kind):
        tokenizer = made(kind, 3)
        tokenizer.chat_template = TEMPLATE
        stock = build_stock(vocab_size=len(tokenizer), max_position_embeddings=256)
        workers.append(Worker({"it": Engine(stock, tokenizer)}, 8))
        workers[-1].start()
        return LocalService(workers[-1]), tokenizer

    services = {}

    def asked(kind, is_chat=False, **fields):
        service, tokenizer = services.get(kind) or services.setdefault(kind, start(kind))
        request = (ChatRequest if is_chat else CompletionRequest)(model="it", **fields)

        async def collect():
            return [chunk async for chunk in service.answer(request)]

        chunks = asyncio.run(collect())
        if request.stream:
            return [json.loads(chunk[6:]) for chunk in chunks if chunk != "data: [DONE]\n\n"], tokenizer
        return json.loads(chunks[0]), tokenizer

    yield asked
    for worker in workers:
        worker.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_join_to_the_text_of_a_chat(ask, kind):
    fields = {"messages": [{"role": "user", "content": "a bo"}], "logprobs": True, "top_logprobs": 5, "n": 3}
    answer, _ = ask(kind, is_chat=True, max_tokens=16, temperature=1.0, seed=2, ignore_eos=True, **fields)
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        joined = bytes(byte for token in content for byte in token["bytes"])
        if "\ufffd" not in choice["message"]["content"]:
            assert joined.decode() == choice["message"]["content"]
        elif kind == "byte level":
            assert joined.decode(errors="replace") == choice["message"]["content"]
        for token in content:
            assert len(token["top_logprobs"]) == 5
            assert all(isinstance(byte, int) for top in token["top_logprobs"] for byte in top["bytes"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["llama 2", "unigram", "wordpiece"])
def test_an_echoed_prompt_and_its_completion_are_one_text(ask, kind, stream):
    prompt = [0, 9, 10, 24]
    bias = dict.fromkeys(range(35, 291), -100.0) if kind == "llama 2" else None  # no single bytes
    options = {"temperature": 0.0, "ignore_eos": True, "logit_bias": bias}
    answer, tokenizer = ask(kind, prompt=prompt, echo=True, max_tokens=8, stream=stream, **options)
    model = build_stock(vocab_size=len(tokenizer), max_position_embeddings=256)
    params = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True, logit_bias=bias or {})
    (generation,) = Engine(model).generate([prompt], params)
    choices = [chunk["choices"][0] for chunk in answer] if stream else answer["choices"]
    expected = tokenizer.decode(prompt + generation.token_ids, skip_special_tokens=True)
    assert "".join(choice["text"] for choice in choices) == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_five_entries_stay_five_and_offsets_lead_into_the_text_that_is_sent(ask, kind, stream):
    fields = {
        "prompt": [0, 5, 4, 3, 2, 6],
        "echo": True,
        "logprobs": 5,
        "max_tokens": 12,
        "seed": 5,
        "temperature": 1.0,
    }
    answer, tokenizer = ask(kind, stream=stream, ignore_eos=True, **fields)
    choices = [chunk["choices"][0] for chunk in answer] if stream else answer["choices"]
    text = "".join(choice["text"] for choice in choices)
    tokens, tops, offsets = (
        [entry for choice in choices for entry in choice["logprobs"][name]]
        for name in ("tokens", "top_logprobs", "text_offset")
    )
    assert len(tokens) == len(tops) == len(offsets) == 18
    assert tokens[0] == "<s>" and tops[0] is None and offsets[:2] == [0, 0]
    assert text.startswith(tokenizer.decode(fields["prompt"], skip_special_tokens=True))
    for token, top in zip(tokens[1:], tops[1:], strict=True):
        assert token in top and len(top) in (5, 6)  # the token itself may be none of the five
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if token not in ("<s>", "</s>") and not token.startswith("bytes:"):
            assert text[offset:].startswith((token, "\ufffd"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_adds_the_bytes_that_it_adds_behind_a_word(kind):
    tokenizer = made(kind, 3)
    texts = TokenTexts(tokenizer)
    (word,) = texts._context
    for token in range(2, len(tokenizer)):
        added = oracle(tokenizer, [word], [token])
        assert texts.bytes_of(token, False).decode(errors="replace") == added
        assert texts.bytes_of(token, True).decode(errors="replace") == tokenizer.decode([token])
    assert texts.bytes_of(0, False) == b"" and texts.name(0, b"") == "<s>"


def test_parts_of_a_character_are_named_by_their_bytes():
    data = "é".encode()
    for kind, pieces in (("byte level", bytes_as_letters(data)), ("llama 2", [f"<0x{byte:02X}>" for byte in data])):
        tokenizer = made(kind, 3)
        texts = TokenTexts(tokenizer)
        parts = [texts.bytes_of(tokenizer.convert_tokens_to_ids(piece), False) for piece in pieces]
        assert b"".join(parts) == data
        assert [texts.name(99, part, "bytes:") for part in parts] == ["bytes:\\xc3", "bytes:\\xa9"]
        assert [texts.name(99, part) for part in parts] == ["\\xc3", "\\xa9"]


def test_every_byte_has_a_letter():
    assert [letter for letter, _ in sorted(byte_letters().items(), key=lambda item: item[1])] == bytes_as_letters(
        range(256)
    )


def test_tokens_that_a_text_tells_apart_by_a_space_alone_have_two_names():
    tokenizer = made("llama 2", 3)
    texts = TokenTexts(tokenizer)
    ids = [tokenizer.convert_tokens_to_ids(piece) for piece in ("bo", MARK + "bo")]
    assert [texts.name(token, texts.bytes_of(token, False)) for token in ids] == ["bo", " bo"]
