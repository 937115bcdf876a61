"""Calls of tools and their results in a chat's history go through the template; none are generated."""

import json
from types import SimpleNamespace

import pytest
from runtime.test_first_space import made

from dmc import SamplingParams
from dmc.serving.requests import APIError, ChatRequest, encode_prompts, parse

TOOLS = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.id }} {{ call.function.name }} "
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}]{% endfor %}"
    "{% if message.role == 'tool' %}({{ message.tool_call_id }}){% endif %}{% endfor %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
HISTORY = [
    {"role": "user", "content": "cold?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "-3"},
]


class Written:
    """A tokenizer that keeps what its template has written."""

    def __init__(self, template):
        self.chat_template, self._tokenizer, self.bos_token_id = template, made("llama 2", 0), 0

    def apply_chat_template(self, messages, **options):
        options = {"tokenize": False, "chat_template": self.chat_template}
        self.text = self._tokenizer.apply_chat_template(messages, **options)
        return [5]


def encoded(template, messages, **fields):
    model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(num_embeddings=99))
    engine = SimpleNamespace(tokenizer=Written(template), model=model)
    body = {"model": "it", "messages": messages, **fields}
    assert encode_prompts(parse(ChatRequest, json.dumps(body).encode()), engine) == [[5]]
    return engine.tokenizer.text


def test_a_call_and_its_result_go_through_the_template():
    expected = "<user>cold?<assistant>[c1 weather city=Oslo]<tool>-3(c1)"
    assert encoded(TOOLS, HISTORY) == expected
    said = [HISTORY[0], {**HISTORY[1], "content": "hm", "refusal": None}, HISTORY[2]]
    assert encoded(TOOLS, said) == expected.replace("<assistant>", "<assistant>hm")
    silent = {**CALL, "function": {"name": "now", "arguments": ""}}
    assert encoded(TOOLS, [{"role": "assistant", "tool_calls": [silent]}]) == "<assistant>[c1 now ]"


@pytest.mark.parametrize(
    ("messages", "status", "message"),
    [
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], 422, "messages.0.tool_calls=.* not served"),
        ([{"role": "assistant", "content": None}], 400, "messages.0=.*: expected content, or tool_calls"),
        ([{"role": "assistant", "tool_calls": []}], 400, r"messages.0.tool_calls=\[\]: expected"),
        (
            [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}],
            400,
            "messages.0.tool_calls.0.function.arguments='{': expected the JSON of an object",
        ),
        ([{"role": "king", "content": "x"}], 400, "messages.0.role=king: expected 'system'"),
    ],
)
def test_what_is_no_history_is_named(messages, status, message):
    with pytest.raises(APIError, match=message) as caught:
        encoded(TOOLS, messages)
    assert caught.value.status == status


def test_a_template_that_would_leave_calls_out_is_an_error_and_not_a_silence():
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(APIError, match="the chat template of 'it' leaves out tool_calls"):
        encoded(template, HISTORY)
    assert encoded(template, [HISTORY[0], HISTORY[2]]) == "cold?-3"


def test_calls_are_not_generated():
    with pytest.raises(APIError, match=r"tools=.* is not served"):
        encoded(TOOLS, HISTORY, tools=[{"type": "function"}])


def test_minus_one_samples_among_all():
    assert SamplingParams(top_k=-1).numbers == SamplingParams().numbers
    for wrong in (0, -2, True):
        with pytest.raises(ValueError, match=f"top_k={wrong}"):
            SamplingParams(top_k=wrong)
