import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dmc import Engine, SamplingParams, retrofit
from dmc.compression import CompressionConfig
from dmc.kernels import reference
from dmc.runtime.capacity import capacities, request_bytes
from dmc.runtime.step_time import DEVICES, Device, StepTime, decode_step

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def stock_model():
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, max_position_embeddings=4096, **SHAPE))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("tokens", [1, 47, 64, 100])
@pytest.mark.parametrize("ratio", [1.0, 2.0, 4.0])
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


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("ratio", "kv_cache_dtype"), [(1.0, "auto"), (4.0, "auto"), (4.0, "int8")])
def test_bytes_that_a_step_is_predicted_to_read_are_those_that_it_reads(ratio, kv_cache_dtype, ties, monkeypatch):
    config = LlamaConfig(vocab_size=128, num_key_value_heads=2, tie_word_embeddings=ties, **SHAPE)
    pooled = CompressionConfig(decisions="fixed", weighting="uniform", target_ratio=ratio)
    model = retrofit(LlamaForCausalLM(config), pooled)
    engine, counted = Engine(model, kernels="reference", kv_cache_dtype=kv_cache_dtype), {"weights": 0, "cache": 0}
    prompts = [list(range(1, 64)), list(range(2, 65))]
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(max_new_tokens=4, temperature=0, ignore_eos=True))
    engine.step()

    def attend(query, key_pages, value_pages, block_tables, lengths, scaling, *, rows, **options):
        entry = sum(each[0, 0].nbytes for each in (key_pages, value_pages, *(options["scales"] or ())))
        counted["cache"] += int(lengths[rows].sum()) * entry
        return attention(query, key_pages, value_pages, block_tables, lengths, scaling, rows=rows, **options)

    def count(module, *_):
        counted["weights"] += sum(each.nbytes for each in module.parameters(recurse=False))

    attention = reference.paged_attention
    monkeypatch.setattr(reference, "paged_attention", attend)
    for module in model.modules():
        if not isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(count)
    engine.step()  # of 64 tokens each
    weights = sum(each.nbytes for each in model.parameters())
    step = decode_step(config, engine.cache.layout, weights, len(prompts), 64, ratio)
    assert (step.weight_bytes, step.cache_bytes) == (counted["weights"], counted["cache"])


def test_a_step_is_bound_by_launches_or_reads():
    slow, fast = Device("slow", 1e12, 1e14), DEVICES[1]
    reads, launches = StepTime(10, 10**10, 10**10, 10**9), StepTime(2000, 10**6, 10**6, 10**6)
    assert reads.seconds(slow, False) > 2 * reads.seconds(fast, False)
    assert launches.seconds(slow, False) == launches.seconds(fast, False) > 2 * launches.seconds(fast, True)
