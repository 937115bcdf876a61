"""Stock vLLM on a CPU, from its engine to its input batch: the tokens of exported folders equal those of `Engine`."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.engine.llm_engine", reason="vLLM is not installed here")

from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VllmSamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.forward_context import set_forward_context
from vllm.inputs import TokensPrompt
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.model_executor.models.utils import extract_layer_index

from dmc import Engine, SamplingParams
from dmc.vllm import model as model_module
from dmc.vllm import plugin
from dmc.vllm.attention import LAYER_NAME
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
"""Family and gates."""
LENGTHS, NUM_NEW = (5, 130, 33, 1, 70, 200, 18), 64
CACHE_BYTES = 18 * 4 * 16 * 2 * 16 * 4  # blocks of 16 slots, heads of all layers, keys and values, channels, float32
ARRIVALS = {0: [1, 5], 3: [2, 4], 5: [0, 3], 30: [6]}
"""Which prompts come before which step."""


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Let the engine, its scheduler and its worker run here."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    plugin.register()
    yield
    cleanup_dist_env_and_memory()
    gc.collect()


def engine_args(folder, **changes):
    options = {
        "skip_tokenizer_init": True, "block_size": 16, "dtype": "float32", "max_model_len": 272,
        "max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": CACHE_BYTES,
        "worker_cls": "cpu_vllm.Worker",
    }  # fmt: skip
    return EngineArgs(model=str(folder), **{**options, **changes})


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
    engine = LLMEngine.from_engine_args(engine_args(tmp_path))
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


def test_settings_that_are_not_served_are_refused(make_compressed, tmp_path):
    make_compressed().save_pretrained(tmp_path)
    foreign = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    for asked, named in (
        ({"enable_lora": True}, "LoRA"),
        ({"kv_transfer_config": foreign}, "a kv_connector of your own"),
    ):
        with pytest.raises(ValueError, match=f"is not served with {named}"):
            engine_args(tmp_path, **asked).create_engine_config()
    config = engine_args(tmp_path).create_engine_config()
    assert not config.cache_config.enable_prefix_caching and config.kv_transfer_config.kv_connector == "DMCConnector"


def test_layers_without_full_attention_are_refused(make_compressed, monkeypatch):
    monkeypatch.setattr(model_module, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0, world_size=1))
    config = make_compressed(
        "olmo3", num_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=8
    ).config
    vllm_config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=config, model="", dtype=torch.float32))
    with pytest.raises(NotImplementedError, match="layer 1 of this dmc_olmo3 model"):
        model_module.DMCForCausalLM(vllm_config=vllm_config)


def test_vllms_table_of_settings_by_architecture_is_as_we_use_it():
    assert MODELS_CONFIG_MAP["DMCLlamaForCausalLM"] is plugin.CompressedModelConfig
    assert all(issubclass(kind, VerifyAndUpdateConfig) for kind in MODELS_CONFIG_MAP.values())
    assert extract_layer_index(LAYER_NAME) == 0
