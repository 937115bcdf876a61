"""Of chats and instructions the answers are learned: in the cache, in streams, whatever the template marks."""

import copy
import json
import random

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
ANSWERS = ["every key and value\n", "it is merged\n<|endoftext|>"]  # a newline ends no answer of a server's


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
    return [tokenizer.decode(tokens) for tokens in found]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_what_the_assistant_says_is_learned(template, tokenizer):
    instruct = with_template(tokenizer, template)
    (encoded,) = DocumentEncoder(instruct, framing_of(instruct))([CHAT])
    assert encoded.scored is not None
    assert runs(encoded.token_ids.tolist(), encoded.scored.tolist(), instruct) == ANSWERS
    expected = "".join(f"<{message['role']}>{message['content']}\n" for message in CHAT)
    assert tokenizer.decode(encoded.token_ids) == expected + "<|endoftext|>"


def test_chat_is_framed_where_its_template_does_not(tokenizer):
    begin, end = tokenizer.convert_tokens_to_ids("a"), tokenizer.eos_token_id
    for template in (MARKED, "a" + MARKED + "<|endoftext|>"):
        encoded = DocumentEncoder(with_template(tokenizer, template), Framing((begin,), end))([CHAT])[0]
        token_ids = encoded.token_ids.tolist()
        assert token_ids[0] == begin != token_ids[1] and token_ids.count(end) == 1 and token_ids[-1] == end
        assert encoded.scored is not None and not encoded.scored[0] and encoded.scored[-1]


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


# As Qwen3's: an answer before the last question loses its thoughts, the last answer has some, if only empty ones.
QWEN3 = """\
{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set last = namespace(question=messages|length - 1, searched=true) %}
{%- for message in messages[::-1] %}
    {%- set index = messages|length - 1 - loop.index0 %}
    {%- if last.searched and message.role == 'user' and not message.content.endswith('</tool_response>') %}
        {%- set last.searched = false %}{%- set last.question = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thoughts = message.reasoning_content or '' %}
        {%- if not thoughts and '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.question and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ '<|begin|>' }}{% endif %}"
    "{{ '<|header|>' + m.role + '<|/header|>\\n\\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\\n\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' </s>' }}{% endif %}{% endfor %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|/header|>", "<|eot|>", "<s>", "</s>", "[INST]",
           "[/INST]"]  # fmt: skip


def qwen3_turns(chat):
    """Return pieces of text, and whether each is learned, of a chat with or without thoughts in its answers."""
    pieces, last = [], max(n for n, message in enumerate(chat) if message["role"] == "user")
    for number, message in enumerate(chat):
        text = message["content"]
        if message["role"] != "assistant":
            pieces += [(f"<|im_start|>{message['role']}\n{text}<|im_end|>\n", False)]
            continue
        thoughts, _, answer = text.rpartition("</think>")
        thoughts = message.get("reasoning_content", thoughts.removeprefix("<think>")).strip("\n")
        answer = answer.lstrip("\n") if "</think>" in text else text
        if number > last and (thoughts or number == len(chat) - 1):
            answer = f"<think>\n{thoughts}\n</think>\n\n" + answer.lstrip("\n")
        pieces += [("<|im_start|>assistant\n", False), (answer + "<|im_end|>\n", True)]
    return pieces


def chatml_turns(chat):
    for message in chat:
        yield f"<|im_start|>{message['role']}\n", False
        yield f"{message['content']}<|im_end|>\n", message["role"] == "assistant"


def llama3_turns(chat):
    yield "<|begin|>", False
    for message in chat:
        yield f"<|header|>{message['role']}<|/header|>\n\n", False
        yield f"{message['content'].strip()}<|eot|>", message["role"] == "assistant"


def llama2_turns(chat):
    for message in chat:
        answers = message["role"] == "assistant"
        yield (f" {message['content'].strip()} </s>" if answers else f"<s>[INST] {message['content']} [/INST]"), answers


def chats_of(number, with_system):
    """Return chats that differ in turns, thoughts, the white space around them, and what their answers repeat."""
    draw, said = (
        random.Random(number),
        ["4", "a", "it is merged", "\n\nkeys and\nvalues\n", "assistant", "user\n", "it"],
    )
    chat = [{"role": "system", "content": "be the cache"}] if with_system and draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 4)):
        chat.append({"role": "user", "content": draw.choice(["what is 2 + 2?", "it is merged", "the assistant", "a"])})
        answer, thoughts = draw.choice(said), draw.choice(said)
        style = draw.choice(["plain", "thoughts", "field"])
        text = f"<think>\n{thoughts}{answer}\n</think>\n\n{answer}" if style == "thoughts" else answer
        chat.append({"role": "assistant", "content": text})
        if style == "field":
            chat[-1]["reasoning_content"] = f"{thoughts} {answer}"
    return chat


@pytest.mark.parametrize(
    ("template", "turns_of"),
    [(QWEN3, qwen3_turns), (CHATML, chatml_turns), (LLAMA3, llama3_turns), (LLAMA2, llama2_turns)],
    ids=["qwen3", "chatml", "llama3", "llama2"],
)
def test_of_chats_of_several_turns_what_the_assistant_says_is_learned(template, turns_of, tokenizer):
    instruct = with_template(tokenizer, template)
    instruct.add_special_tokens({"additional_special_tokens": SPECIAL})
    encoder = DocumentEncoder(instruct, framing_of(instruct))
    for number in range(60):
        chat = chats_of(number, with_system=turns_of is not llama2_turns)
        pieces = list(turns_of(chat))
        (encoded,) = encoder([chat])
        assert not encoded.refusal and encoded.scored is not None
        assert instruct.decode(encoded.token_ids) == "".join(text for text, _ in pieces) + "<|endoftext|>"
        learned = runs(encoded.token_ids.tolist(), encoded.scored.tolist(), instruct)
        assert learned == [text for text, is_learned in pieces if is_learned]


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        ([CHAT[0], {"role": "user", "content": "<|im_start|>assistant\nno"}, CHAT[1]], "message 1 holds"),
        ([*CHAT[:2], {"role": "assistant", "content": "x" * 40}], "message 2, of the assistant, cannot be found"),
        ([*CHAT[:1], {"role": "assistant", "content": "loud"}], "by how they end"),
    ],
)
def test_a_turn_that_cannot_be_found_refuses_its_chat(chat, reason, tokenizer):
    odd = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.content | length < 40 %}")
    odd = odd.replace("m.content +", "(m.content | upper if m.content.endswith('loud') else m.content) +")
    instruct = with_template(tokenizer, odd)
    encoded, plain = DocumentEncoder(instruct, framing_of(instruct))([chat, CHAT])
    assert reason in encoded.refusal and len(plain.token_ids)


@pytest.mark.parametrize(
    ("template", "chat", "reason"),
    [
        (FORGETFUL, CHAT, "mark them with {% generation %}"),
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


def refusing(number, refused):
    """Return chats of which some are refused by a strict template."""
    return [
        [{"role": "user", "content": f"question {i} {'refuse' if i in refused else ''}"},
         {"role": "assistant", "content": f"answer {i} is so"}]
        for i in range(number)
    ]  # fmt: skip


def test_a_tenth_of_the_chats_may_be_refused_with_one_warning(tmp_path, tokenizer, caplog):
    chats = refusing(130, range(7, 130, 10))
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    instruct = with_template(tokenizer, STRICT)
    source = TextSource(str(tmp_path / "chats.jsonl"), messages="messages")
    packed = build_packed(source, instruct, 16, tmp_path / "cache")
    assert (packed.tokens.num_documents, packed.tokens.num_skipped) == (117, 13)
    assert caplog.text.count("are left out, the first is chat 7: an odd turn") == 1
    caplog.clear()
    batches = list(StreamLoader([source], instruct, 16, num_stream_shards=1, batch_size=1, num_draws=150))
    assert caplog.text.count("are left out, the first is chat 7: an odd turn") == 1
    assert "question" in (text := tokenizer.decode(torch.cat([batch["input_ids"][0] for batch in batches])))
    assert "refuse" not in text


@pytest.mark.parametrize("refused", [range(7, 130, 9), range(130)], ids=["some", "all"])
def test_more_than_a_tenth_of_the_chats_refused_ends_the_start_in_one_line(refused, tmp_path, tokenizer):
    chats = refusing(130, refused)
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    instruct = with_template(tokenizer, STRICT)
    source = TextSource(str(tmp_path / "chats.jsonl"), messages="messages")
    first = min(refused)
    for _ in range(2):  # nothing was written that a second start would take
        with pytest.raises(ValueError) as error:
            build_packed(source, instruct, 16, tmp_path / "cache")
        assert "\n" not in str(error.value) and str(error.value).endswith(
            f"refuses {len(refused)} of 130 chats, more than a tenth; the first is chat {first}: an odd turn"
        )
    loader = StreamLoader([source], instruct, 16, num_stream_shards=1, batch_size=1, num_draws=400)
    with pytest.raises(ValueError, match=rf"more than a tenth; the first is chat {first}: an odd turn"):
        list(loader)


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
