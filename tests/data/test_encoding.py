"""Of chats and instructions the answers are learned: in the cache, in streams, whatever the template marks."""

import copy
import json

import pytest
import torch

from dmc.data import Framing, StreamLoader, TextSource, build_packed, framing_of
from dmc.data.encoding import DocumentEncoder

PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant>{% generation %}{{ m['content'] }}\n"
    "{% endgeneration %}{% else %}<{{ m['role'] }}>{{ m['content'] }}\n{% endif %}{% endfor %}"
)
FORGETFUL = "{% for m in messages[-2:] %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
CHAT = [
    {"role": "user", "content": "the cache holds?"},
    {"role": "assistant", "content": "every key and value"},
    {"role": "user", "content": "until?"},
    {"role": "assistant", "content": "it is merged"},
]
ANSWERS = ["every key and value\n", "it is merged\n"]


def with_template(tokenizer, template):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def runs(token_ids, learned, tokenizer):
    """Return the stretches of learned tokens as text."""
    found = []
    for number, (token, is_learned) in enumerate(zip(token_ids, learned, strict=True)):
        if is_learned:
            found += [] if number and learned[number - 1] else [[]]
            found[-1].append(token)
    return [tokenizer.decode(each) for each in found]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_what_the_assistant_says_is_learned(template, tokenizer):
    instruct = with_template(tokenizer, template)
    (encoded,) = DocumentEncoder(instruct, framing_of(instruct))([CHAT])
    assert encoded.scored is not None
    assert runs(encoded.token_ids.tolist(), encoded.scored.tolist(), tokenizer) == ANSWERS
    expected = "".join(f"<{each['role']}>{each['content']}\n" for each in CHAT)
    assert tokenizer.decode(encoded.token_ids) == expected + "<|endoftext|>"


def test_chat_is_framed_where_its_template_does_not(tokenizer):
    begin, end = tokenizer.convert_tokens_to_ids("a"), tokenizer.eos_token_id
    for template in (MARKED, "a" + MARKED + "<|endoftext|>"):
        encoded = DocumentEncoder(with_template(tokenizer, template), Framing((begin,), end))([CHAT])[0]
        token_ids = encoded.token_ids.tolist()
        assert token_ids[0] == begin != token_ids[1] and token_ids.count(end) == 1 and token_ids[-1] == end
        assert encoded.scored is not None and not encoded.scored[[0, -1]].any()


def test_completion_and_what_ends_it_are_learned(tokenizer):
    encoder = DocumentEncoder(tokenizer, Framing((5,), tokenizer.eos_token_id))
    (encoded,) = encoder([("the cache holds ", "every key")])
    assert encoded.token_ids.tolist() == [5, *tokenizer.encode("the cache holds every key"), tokenizer.eos_token_id]
    assert encoded.scored is not None
    (learned,) = runs(encoded.token_ids.tolist(), encoded.scored.tolist(), tokenizer)
    assert learned.endswith("every key<|endoftext|>") and len(learned) <= len(" every key<|endoftext|>")


def test_chats_need_a_template(tokenizer):
    with pytest.raises(ValueError, match="has no chat template: use an instruct model's"):
        DocumentEncoder(with_template(tokenizer, None), framing_of(tokenizer))([CHAT])


@pytest.mark.parametrize(
    ("template", "chat", "reason"),
    [
        (FORGETFUL, CHAT, "rewrites earlier turns; mark the assistant's turns with {% generation %}"),
        ("{{ raise_exception('no system turn') }}", CHAT, "no system turn"),
        ("{{ messages[0]['content'] + 1 }}", CHAT, "can only concatenate str"),
        (MARKED, [{"role": "assistant", "content": "half a pair: \ud83d"}], "TextEncodeInput must be"),
        (MARKED, ["not", "messages"], "no mapping of role and content"),
    ],
)
def test_chat_that_the_template_refuses_is_left_out_and_says_why(template, chat, reason, tokenizer):
    instruct = with_template(tokenizer, template)
    encoded, other = DocumentEncoder(instruct, framing_of(instruct))([chat, "text"])
    assert reason in encoded.refusal and not len(encoded.token_ids)
    assert len(other.token_ids) and not other.refusal


@pytest.fixture
def folder(tmp_path):
    chats = [[{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i} is so"}]
             for i in range(30)]  # fmt: skip
    chats[7] = chats[7][:1]  # nobody answers
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    pairs = [{"question": f"question {i} ", "answer": f"answer {i} is so" if i != 7 else None} for i in range(30)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (tmp_path / "plain.txt").write_text("words of no chat at all " * 30)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "options"),
    [("chats", {"messages": "messages"}), ("pairs", {"prompt": "question", "completion": "answer"})],
)
def test_cached_and_streamed_answers_are_masked_alike(name, options, folder, tokenizer):
    instruct = with_template(tokenizer, MARKED)
    source = TextSource(str(folder / f"{name}.jsonl"), **options)
    packed = build_packed(source, instruct, 16, folder / "cache", document_starts=True)
    assert (packed.tokens.num_documents, packed.tokens.num_skipped) == (29, 1)
    items = [packed[index] for index in range(len(packed))]
    flat = {key: torch.cat([item[key] for item in items]) for key in ("input_ids", "loss_mask", "document_starts")}
    learned = runs(flat["input_ids"].tolist(), flat["loss_mask"].tolist(), tokenizer)
    assert all("answer" in text and "question" not in text for text in learned[:-1]) and len(learned) > 20
    assert all(flat["document_starts"][1:][flat["input_ids"][:-1] == tokenizer.eos_token_id])
    loader = StreamLoader(
        [source], instruct, 16, num_stream_shards=1, batch_size=1, num_draws=len(packed), document_starts=True
    )
    for item, batch in zip(items, loader, strict=True):
        for key in flat:
            assert torch.equal(item[key], batch[key][0])


STRICT = MARKED.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if 'refuse' in m['content'] %}{{ raise_exception('an odd turn') }}{% endif %}",
)


@pytest.mark.parametrize("refused", [range(0, 30, 2), range(30)], ids=["some", "all"])
def test_refused_chats_are_skipped_and_counted_in_one_warning_unless_all_are(
    refused, tmp_path, tokenizer, caplog, monkeypatch
):
    rows = [
        [{"role": "user", "content": f"question {i} {'refuse' if i in refused else ''}"},
         {"role": "assistant", "content": f"answer {i} is so"}]
        for i in range(30)
    ]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    instruct = with_template(tokenizer, STRICT)
    source = TextSource(str(tmp_path / "chats.jsonl"), messages="messages")
    loader = StreamLoader([source], instruct, 16, num_stream_shards=1, batch_size=1, num_draws=20)
    if len(refused) == 30:
        monkeypatch.setattr("dmc.data.streaming.MOST_WITHOUT_TOKENS", 64)
        with pytest.raises(ValueError, match=r"is empty: no document .*the chat template refuses them: an odd turn"):
            build_packed(source, instruct, 16, tmp_path / "cache")
        with pytest.raises(ValueError, match=r"have nothing to learn: .*the chat template refuses chats: an odd turn"):
            list(loader)
        return
    packed = build_packed(source, instruct, 16, tmp_path / "cache")
    assert (packed.tokens.num_documents, packed.tokens.num_skipped) == (15, 15)
    assert "skipped 15 documents without an answer, or refused, kept 15" in caplog.text
    assert caplog.text.count("which the chat template refuses: an odd turn") == 2  # after the first and the tenth
    caplog.clear()
    batches = list(loader)
    assert caplog.text.count("skipped 1 chats so far") == 1
    assert "question" in (text := tokenizer.decode(torch.cat([each["input_ids"][0] for each in batches])))
    assert "refuse" not in text


def test_text_beside_chats_is_learned_whole(folder, tokenizer):
    instruct = with_template(tokenizer, PLAIN)
    sources = [TextSource(str(folder / "chats.jsonl"), messages="messages"), TextSource(str(folder / "plain.txt"))]
    blend = build_packed(sources, instruct, 16, folder / "cache")
    items = [blend[position] for position in range(8)]
    assert {bool(item["loss_mask"].all()) for item in items if item["source"] == 1} == {True}
    assert {bool(item["loss_mask"].all()) for item in items if item["source"] == 0} == {False}
    assert "loss_mask" not in build_packed(sources[1], instruct, 16, folder / "cache")[0]


def test_another_template_makes_another_cache_of_chats_alone(folder, tokenizer):
    sources = [TextSource(str(folder / "chats.jsonl"), messages="messages"), TextSource(str(folder / "plain.txt"))]
    for count, template in ((2, PLAIN), (3, MARKED)):
        build_packed(sources, with_template(tokenizer, template), 16, folder / "cache")
        assert sum(path.is_dir() for path in (folder / "cache").iterdir()) == count


def test_options_of_chats_that_contradict_are_refused(folder, tokenizer):
    for options in ({"prompt": "question"}, {"completion": "a"}, {"messages": "m", "prompt": "q", "completion": "a"}):
        with pytest.raises(ValueError, match="give messages=, or prompt= and completion="):
            TextSource("a.jsonl", **options)
    pairs, text = str(folder / "pairs.jsonl"), str(folder / "plain.txt")
    with pytest.raises(TypeError, match=r"'question' .* holds str, expected a list of messages"):
        TextSource(pairs, messages="question").check()
    with pytest.raises(ValueError, match="no column 'messages'; it has"):
        TextSource(pairs, messages="messages").check()
    with pytest.raises(ValueError, match="holds text files, which have no columns"):
        TextSource(text, messages="messages").check()
    assert next(TextSource(pairs, prompt="question", completion="answer").documents()) == "question 0 answer 0 is so"
    assert (
        next(TextSource(str(folder / "chats.jsonl"), messages="messages").documents()) == "question 0\nanswer 0 is so"
    )
