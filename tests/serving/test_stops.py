"""Stop strings of a request: text stops by its letters, special tokens, which are no part of the text, by their ids."""

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from dmc.serving.requests import ChatRequest, CompletionRequest, sampling_params

BODIES = {
    CompletionRequest: {"model": "own", "prompt": "line 1"},
    ChatRequest: {"model": "own", "messages": [{"role": "user", "content": "line 1"}]},
}


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_a_special_token_stops_by_its_id_and_other_text_by_its_letters(kind, folders):
    tokenizer = AutoTokenizer.from_pretrained(folders.stock)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    turn, end = tokenizer.convert_tokens_to_ids("<|turn|>"), tokenizer.eos_token
    request = kind(**BODIES[kind], max_tokens=4, stop=["\n\n", "<|turn|>", end], stop_token_ids=[7])
    params = sampling_params(request, 2, SimpleNamespace(tokenizer=tokenizer), 64)
    assert params.stop == ("\n\n",) and set(params.stop_token_ids) == {7, turn, tokenizer.eos_token_id}
    alone = kind(**BODIES[kind], max_tokens=4, stop="<|turn|>")
    assert sampling_params(alone, 2, SimpleNamespace(tokenizer=tokenizer), 64).stop_token_ids == (turn,)
