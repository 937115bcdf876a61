"""Stock vLLM on a CPU, from its engine to its input batch: the tokens of exported folders equal those of `Engine`."""

import gc

import pytest
import torch

pytest.importorskip("vllm.v1.engine.llm_engine", reason="vLLM is not installed here")

from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VllmSamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.forward_context import set_forward_context
from vllm.inputs import TokensPrompt

from dmc import Engine, SamplingParams
from dmc.vllm.plugin import register
from dmc.vllm.worker_cache import WorkerCache

VARIANTS = {
    "merge": ("llama", {}),
    "exact merge with delay": ("llama", {"window_size": None, "delay": 3}),
    "drop with delay": ("qwen3", {"action": "drop", "delay": 5}),
    "merge by hidden gates": ("qwen3", {"gate_input": "hidden", "delay": 2}),
    "drop of the token before by hidden gates": (
        "llama", {"action": "drop", "delay": 4, "gate_input": "hidden", "decided_token": "previous"}
    ),
}  # fmt: skip
LENGTHS, NUM_NEW = (5, 130, 33, 1, 70, 200, 18), 64
BLOCK_BYTES = 4 * 16 * 2 * 16 * 4  # heads of all layers, slots, keys and values, channels, float32
ARRIVALS = {0: [1, 5], 3: [2, 4], 5: [0, 3], 30: [6]}
"""Which prompts come before which step."""


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Let the engine, its scheduler and its worker run here."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    register()
    yield
    cleanup_dist_env_and_memory()
    gc.collect()


def open_engine(folder, **changes):
    options = {
        "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 272, "max_num_batched_tokens": 64,
        "max_num_seqs": 4, "block_size": 16, "kv_cache_memory_bytes": 18 * BLOCK_BYTES, "worker_cls": "cpu_vllm.Worker",
    }  # fmt: skip
    return LLMEngine.from_engine_args(EngineArgs(model=str(folder), **{**options, **changes}))


def run(engine, prompts, aborted=()):
    """Feed prompts as they arrive, and abort some ten steps later; return the tokens of all others."""
    sampling = VllmSamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
    tokens, step = {}, 0
    while step <= max(ARRIVALS) or engine.has_unfinished_requests():
        for i in ARRIVALS.get(step, []):
            engine.add_request(str(i), TokensPrompt(prompt_token_ids=prompts[i]), sampling)
        engine.abort_request([str(i) for i in aborted if i in ARRIVALS.get(step - 10, [])])
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        step += 1
    return [tokens.get(i) for i in range(len(prompts))]


def worker_cache(engine):
    return engine.vllm_config.compilation_config.static_forward_context["dmc.0"].cache


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_equal_the_engines_under_a_mixed_load(name, make_compressed, make_prompts, tmp_path, monkeypatch):
    family, gates = VARIANTS[name]
    model, prompts = make_compressed(family, gates=gates), make_prompts(*LENGTHS)
    model.save_pretrained(tmp_path)
    generations = Engine(model).generate(prompts, SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0))
    engine = open_engine(tmp_path)
    cache, started = worker_cache(engine), []
    monkeypatch.setattr(
        cache, "begin_step", lambda *told: started.extend(told[1]) or WorkerCache.begin_step(cache, *told)
    )
    found = run(engine, prompts, aborted=[2])
    assert found[2] is None
    for i, generation in enumerate(generations):
        assert i == 2 or found[i] == generation.token_ids, i
    assert len(started) > len(prompts)  # some were preempted, and began again
    WorkerCache.begin_step(cache, 10**6, {}, [*cache._rows])  # those that finished last are told with the next step
    assert int(cache.num_free) == len(cache.key_pages)
    assert sorted(cache.free_pages[:-1].tolist()) == list(range(len(cache.key_pages)))
    with set_forward_context(None, engine.vllm_config):  # as vLLM measures a step's memory
        hidden = engine.model_executor.driver_worker.get_model()(torch.arange(5), torch.arange(5))
    assert hidden.shape == (5, model.config.hidden_size) and int(cache.num_free) == len(cache.key_pages)
