import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from dmc import Engine, SamplingParams, retrofit
from dmc.compression import CompressionConfig
from dmc.runtime.capacity import capacities, request_bytes

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def stock_model():
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, max_position_embeddings=4096, **SHAPE))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("ratio", "tokens"), [(1.0, 1), (1.0, 100), (2.0, 47), (4.0, 64), (4.0, 100)])
def test_bytes_of_a_request_are_those_that_an_engine_counts(ratio, tokens, kv_cache_dtype):
    pooled = CompressionConfig(decisions="fixed", weighting="uniform", target_ratio=ratio)
    engine = Engine(retrofit(stock_model(), pooled), kv_cache_dtype=kv_cache_dtype)
    (generation,) = engine.generate([list(range(1, tokens + 1))], SamplingParams(max_new_tokens=1, temperature=0.0))
    reached = max(1.0, tokens / -(-tokens // ratio))  # fixed pooling opens a slot for what is left over
    assert generation.stats.bytes_allocated == request_bytes(engine.cache.layout, tokens, reached)


def test_requests_and_the_longest_one_grow_with_the_ratio():
    model = retrofit(stock_model(), CompressionConfig(action="drop", delay=16))
    layout = Engine(model).cache.layout
    one, two, four = capacities(model.config, layout, 0, 2**26, 1024, [1, 2, 4])
    assert one.requests > 0 and two.requests == pytest.approx(2 * one.requests, rel=0.1)
    assert four.requests == pytest.approx(4 * one.requests, rel=0.1) and four.longest > 3 * one.longest
    assert request_bytes(layout, four.longest, 4) > request_bytes(layout, four.longest - 64, 4)


def test_nothing_fits_beside_weights_that_fill_the_memory():
    model = stock_model()
    (one,) = capacities(model.config, Engine(model).cache.layout, 2**26, 2**26, 1024, [1])
    assert (one.requests, one.longest) == (0, 0)
