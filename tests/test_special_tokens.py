"""Texts that something follows begin as the tokenizer begins them, once, and do not end."""

import pytest
from conftest import build_stock
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig

from dmc import Engine, SamplingParams
from dmc.data import framing_of, train_tokenizer
from dmc.results.tasks.prompts import Encoder
from dmc.serving.requests import encode_prompt
from dmc.special_tokens import encode_text, ends_of_text, tokens_before

TEXT = "line 3 and more"
TEMPLATES = {"none": "$A", "begins": "<s> $A", "ends": "$A </s>", "both": "<s> $A </s>"}


@pytest.fixture(params=TEMPLATES)
def tokenizer(request, tmp_path):
    tokenizer = train_tokenizer(["some words and others\n" * 9], 290, tmp_path / "tokenizer")
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    special = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    template = TemplateProcessing(single=TEMPLATES[request.param], special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.begins = request.param in ("begins", "both")
    return tokenizer


def test_a_prompt_begins_once_and_does_not_end(tokenizer):
    plain = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    begin = [tokenizer.bos_token_id] if tokenizer.begins else []
    assert tokens_before(tokenizer) == framing_of(tokenizer).begin == tuple(begin)
    assert encode_text(tokenizer, TEXT, begins_text=True) == begin + plain
    assert encode_text(tokenizer, TEXT, begins_text=False) == plain
    assert encode_text(tokenizer, "<s>" + TEXT, begins_text=True) == [tokenizer.bos_token_id, *plain]
    assert Encoder(tokenizer).begin == begin


def test_every_door_encodes_a_prompt_alike(tokenizer):
    engine = Engine(build_stock(vocab_size=len(tokenizer)), tokenizer)
    tokens = encode_text(tokenizer, TEXT, begins_text=True)
    assert encode_prompt(TEXT, engine, "prompt") == tokens
    greedy = SamplingParams(max_new_tokens=4, temperature=0.0)
    of_text, of_tokens = engine.generate([TEXT, tokens], greedy)
    assert of_text.token_ids == of_tokens.token_ids
    assert of_text.stats.tokens_seen == len(tokens) + 3


def test_generations_end_at_the_tokenizers_end_too_where_the_model_has_one(tokenizer):
    end = tokenizer.eos_token_id
    for configured, expected in ((None, []), (-1, []), (7, [7, end]), ([7, end], [7, end]), (end, [end])):
        assert ends_of_text(GenerationConfig(eos_token_id=configured), tokenizer) == expected
    assert ends_of_text(GenerationConfig(eos_token_id=[7, 8]), None) == [7, 8]
    model = build_stock(vocab_size=len(tokenizer))
    params = SamplingParams(max_new_tokens=9, temperature=0.0, logit_bias={end: 100.0})
    for configured, length in ((None, 9), (7, 1)):
        model.generation_config = GenerationConfig(eos_token_id=configured)
        (generation,) = Engine(model, tokenizer).generate([TEXT], params)
        assert len(generation.token_ids) == length
        (ignored,) = Engine(model, tokenizer).generate([TEXT], SamplingParams(**{**vars(params), "ignore_eos": True}))
        assert len(ignored.token_ids) == 9
