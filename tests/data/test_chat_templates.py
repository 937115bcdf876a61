"""Of every style of chat templates and every order of roles: what a person would train on, or a refusal."""

import copy
import random

import pytest

from dmc.data import framing_of
from dmc.data.encoding import DocumentEncoder
from dmc.data.sources import text_of

END = "<|endoftext|>"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|/header|>", "<|eot|>", "<s>", "</s>", "<|sep|>",
           "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]  # fmt: skip


def prompted(template, header):
    return template + "{% if add_generation_prompt %}" + header + "{% endif %}"


def chatml(say):
    each = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}" + say + "{{ '<|im_end|>\\n' }}{% endfor %}"
    return prompted(each, "{{ '<|im_start|>assistant\\n' }}")


GENERATED = "{% if m.role == 'assistant' %}{% generation %}{{ said }}{% endgeneration %}{% else %}{{ said }}{% endif %}"
TEMPLATES = {
    "chatml": chatml("{{ m.content }}"),
    "chatml_marked": chatml("{% set said = m.content %}" + GENERATED),
    "llama3": prompted(
        "{{ '<|begin|>' }}{% for m in messages %}"
        "{{ '<|header|>' + m.role + '<|/header|>\\n\\n' + m.content | trim + '<|eot|>' }}{% endfor %}",
        "{{ '<|header|>assistant<|/header|>\\n\\n' }}",
    ),
    "llama2": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content | trim + ' </s>' }}"
        "{% else %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
    "gemma": prompted(
        "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
        "{{ m.content | trim + '<end_of_turn>\\n' }}{% endfor %}",
        "{{ '<start_of_turn>model\\n' }}",
    ),
    "phi3": prompted(
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}",
        "{{ '<|assistant|>\\n' }}",
    ),
    "vicuna": prompted(
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ASSISTANT: ' + m.content + '</s>' }}"
        "{% else %}{{ m.role | upper + ': ' + m.content }}{% endif %}{% endfor %}",
        " ASSISTANT:",
    ),
    "newlines": prompted("{% for m in messages %}{{ m.role + '> ' + m.content + '\\n' }}{% endfor %}", "assistant>"),
    "newlines_marked": prompted(
        "{% for m in messages %}{{ m.role + '>' }}{% set said = ' ' + m.content %}"
        + GENERATED
        + "{{ '\\n' }}{% endfor %}",
        "assistant>",
    ),
    "next_header": prompted(
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if not loop.last %} {% endif %}{% endfor %}",
        " assistant:",
    ),
    "separated": prompted(
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{{ '' if loop.last else '<|sep|>' }}{% endfor %}",
        "{{ '<|sep|>assistant:' }}",
    ),
}
HEADERS_BETWEEN = {"llama2", "next_header", "separated"}
"""Styles whose answers can be told only where they follow another role's turn."""


def turns(style, chat):
    """What the chat looks like, in pieces, and whether a person would train on each."""
    for number, message in enumerate(chat):
        role, text, is_last = message["role"], message["content"], number == len(chat) - 1
        answers = role == "assistant"
        if style in ("chatml", "chatml_marked"):
            yield f"<|im_start|>{role}\n", False
            yield f"{text}<|im_end|>\n", answers
        elif style == "llama3":
            yield ("" if number else "<|begin|>") + f"<|header|>{role}<|/header|>\n\n", False
            yield f"{text.strip()}<|eot|>", answers
        elif style == "llama2":
            yield (f" {text.strip()} </s>" if answers else f"<s>[INST] {text} [/INST]"), answers
        elif style == "gemma":
            yield f"<start_of_turn>{'model' if answers else role}\n", False
            yield f"{text.strip()}<end_of_turn>\n", answers
        elif style == "phi3":
            yield f"<|{role}|>\n", False
            yield f"{text}<|end|>\n", answers
        elif style == "vicuna":
            yield (" ASSISTANT:" if answers else f"{role.upper()}: {text}"), False
            yield (f" {text}</s>" if answers else ""), answers
        elif style in ("newlines", "newlines_marked"):
            yield f"{role}>", False
            yield f" {text}\n", answers
        else:
            before = "" if number == 0 else " " if style == "next_header" else ""
            yield f"{before}{role}:", False
            yield f" {text}", answers
            if style == "separated" and not is_last:
                yield "<|sep|>", answers
    ends_itself = style not in ("newlines", "newlines_marked", "next_header", "separated")
    yield END, chat[-1]["role"] == "assistant" and not ends_itself


def merged(pieces):
    """Neighboring pieces of a kind as one."""
    found = []
    for text, is_learned in pieces:
        if found and found[-1][1] == is_learned:
            found[-1][0] += text
        elif text:
            found.append([text, is_learned])
    return [(text, is_learned) for text, is_learned in found]


def encoded_pieces(encoded, tokenizer):
    tokens = zip(encoded.token_ids.tolist(), encoded.scored.tolist(), strict=True)
    return merged((tokenizer.decode([token]), is_learned) for token, is_learned in tokens)


def chat_of(draw, alternates):
    """Make a chat, of users and the assistant in turn, or of any roles in any order with one answer at least."""
    words = ["4", "a", "it is merged", "keys and\nvalues", "what is 2 + 2?", "the assistant", "user: no", "a a"]
    if alternates:
        roles = ["user", "assistant"] * draw.randint(1, 3)
        roles = (["system"] if draw.random() < 0.3 else []) + roles
    else:
        roles = [draw.choice(["user", "assistant", "system", "user"]) for _ in range(draw.randint(1, 6))]
        roles[draw.randrange(len(roles))] = "assistant"
    return [{"role": role, "content": draw.choice(words)} for role in roles]


@pytest.fixture(scope="module")
def encoders(tokenizer):
    made = {}
    for style, template in TEMPLATES.items():
        instruct = copy.deepcopy(tokenizer)
        instruct.chat_template = template
        instruct.add_special_tokens({"additional_special_tokens": SPECIAL})
        made[style] = DocumentEncoder(instruct, framing_of(instruct))
    return made


@pytest.mark.parametrize("style", TEMPLATES)
def test_answers_and_what_ends_them_are_learned(style, encoders):
    encoder, draw = encoders[style], random.Random(0)
    for _ in range(25):
        chat = chat_of(draw, alternates=True)
        (encoded,) = encoder([chat])
        assert not encoded.refusal, (encoded.refusal, chat)
        assert encoded_pieces(encoded, encoder.tokenizer) == merged(turns(style, chat)), chat


@pytest.mark.parametrize("style", TEMPLATES)
def test_whatever_the_order_of_roles_nothing_but_answers_is_learned(style, encoders):
    encoder, draw, num_refused = encoders[style], random.Random(1), 0
    for _ in range(25):
        chat = chat_of(draw, alternates=False)
        (encoded,) = encoder([chat])
        num_refused += bool(encoded.refusal)
        assert encoded.refusal or encoded_pieces(encoded, encoder.tokenizer) == merged(turns(style, chat)), chat
    assert num_refused <= (20 if style in HEADERS_BETWEEN else 5)


def test_of_two_users_in_a_row_neither_is_learned_without_a_header_for_the_assistant(encoders):
    chat = [{"role": role, "content": text} for role, text in [("user", "a b"), ("user", "c d"), ("assistant", "e f")]]
    (encoded,) = encoders["llama2"]([chat])
    learned = [text for text, is_learned in encoded_pieces(encoded, encoders["llama2"].tokenizer) if is_learned]
    assert learned == [" e f </s>"]


def test_generation_marks_of_another_template_do_not_count(encoders, tokenizer):
    instruct = copy.deepcopy(tokenizer)
    instruct.chat_template = {"default": TEMPLATES["newlines"], "tool_use": TEMPLATES["newlines_marked"]}
    chat = [{"role": "user", "content": "the cache holds?"}, {"role": "assistant", "content": "every key"}]
    (encoded,) = DocumentEncoder(instruct, framing_of(instruct))([chat])
    assert merged(turns("newlines", chat)) == encoded_pieces(encoded, instruct)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_list_of_texts_is_one_text(role, encoders):
    parts = [{"type": "text", "text": "it is "}, {"type": "text", "text": "merged"}]
    chat = [{"role": "user", "content": "it is merged"}, {"role": "assistant", "content": "it is merged"}]
    listed = [message | {"content": parts} if message["role"] == role else message for message in chat]
    whole, split = encoders["chatml"]([chat, listed])
    assert whole.token_ids.tolist() == split.token_ids.tolist() and whole.scored.tolist() == split.scored.tolist()
    assert text_of(listed[-1]) == "it is merged"


@pytest.mark.parametrize(
    ("content", "kind"), [([{"type": "image", "url": "a"}], "image"), ({"text": "a"}, "dict"), (4, "int"), ([4], "int")]
)
def test_content_that_is_no_text_is_refused(content, kind, encoders):
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]
    (encoded,) = encoders["chatml"]([chat])
    assert encoded.refusal == f"message 0: its content holds {kind!r}, expected text" and not len(encoded.token_ids)
