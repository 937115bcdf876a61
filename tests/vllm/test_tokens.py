"""Stock vLLM on a CPU, from its engine to its input batch: the tokens of exported folders equal those of `Engine`."""

import gc
import json

import pytest
import torch

pytest.importorskip("vllm.v1.engine.llm_engine", reason="vLLM is not installed here")

from cpu_vllm import claim_streams
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VllmSamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.envs import disable_envs_cache
from vllm.inputs import TokensPrompt
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.triton_utils import HAS_TRITON

from dmc import Engine, SamplingParams, load_model
from dmc.kernels import load_backend
from dmc.models.adapter_folder import Base, save_gates
from dmc.vllm import model as model_module
from dmc.vllm import plugin
from dmc.vllm.attention import LAYER_NAME

pytestmark = pytest.mark.vllm

BLOCK_BYTES = 4 * 16 * 2 * 16 * 4  # heads of all layers, slots, keys and values, channels, float32
CACHE_BYTES = 18 * BLOCK_BYTES
VARIANTS = {
    "merge": ("llama", {}, {}),
    "exact merge with delay, vLLM's own block size": (
        "llama", {"window_size": None, "delay": 3}, {"block_size": None, "kv_cache_memory_bytes": 5 * 8 * BLOCK_BYTES}
    ),
    "drop with delay, asynchronous": ("qwen3", {"action": "drop", "delay": 5}, {"async_scheduling": True}),
    "merge by hidden gates, two ranks": (
        "qwen3", {"gate_input": "hidden", "delay": 2},
        {"tensor_parallel_size": 2, "kv_cache_memory_bytes": CACHE_BYTES // 2},
    ),
    "drop of the token before by hidden gates": (
        "llama", {"action": "drop", "delay": 4, "gate_input": "hidden", "decided_token": "previous"}, {}
    ),
}  # fmt: skip
"""Family, gates, and options of vLLM: actions and inputs of gates stand with both families."""
LENGTHS, NUM_NEW = (5, 130, 33, 1, 70, 200, 18), 64
ARRIVALS = {0: [1, 5], 3: [2, 4], 5: [0, 3], 30: [6]}
"""Which prompts come before which step."""


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Let the engine and its scheduler run here, and the worker too, but for ranks."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    disable_envs_cache()  # which vLLM's engines switch on
    plugin.register()
    yield
    cleanup_dist_env_and_memory()
    gc.collect()


def engine_args(folder, **changes):
    """Settings with which few requests fit at once, so that some are preempted."""
    options = {
        "skip_tokenizer_init": True, "block_size": 16, "dtype": "float32", "max_model_len": 272,
        "max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": CACHE_BYTES,
        "worker_cls": "cpu_vllm.Worker",
    }  # fmt: skip
    return EngineArgs(model=str(folder), **{**options, **changes})


def start(folder, monkeypatch, async_scheduling=False, **options):
    config = engine_args(folder, **options).create_engine_config()
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")  # ranks need not import all of this again
    if async_scheduling:  # which vLLM's CPU platform switches off
        config.scheduler_config.async_scheduling = True
        claim_streams(monkeypatch)
    return LLMEngine.from_vllm_config(config)


class Observed:
    """What the scheduler of an engine tells its workers and is told, step by step."""

    def __init__(self, engine):
        self.engine, self.reports, self.differed = engine, [], False
        self.scheduler = engine.engine_core.engine_core.scheduler
        self.connector = self.scheduler.connector
        (self.runner,) = {*engine.collective_rpc("runner_module")}
        self.started: list[str] = []
        build, update = self.connector.build_connector_meta, self.connector.update_connector_output

        def built(output):
            meta = build(output)
            self.started += meta.started
            return meta

        def updated(output):
            self.reports.append(output.kv_connector_worker_meta)
            update(output)

        self.connector.build_connector_meta, self.connector.update_connector_output = built, updated

    def check_step(self):
        """The last report is the largest over the ranks, and every request has blocks for it."""
        heap, ranks = self.connector.manager, self.engine.collective_rpc("pages_held")
        if not self.reports or (last := self.reports[-1]).step != ranks[0][0]:
            return  # of an asynchronous step
        assert {step for step, _ in ranks} == {last.step} and last.ranks == len(ranks)
        largest = {name: max(held[name] for _, held in ranks) for name in ranks[0][1]}
        assert last.sub_pages == largest
        self.differed |= any(held != largest for _, held in ranks)
        for name, held in heap.held.items():
            if held.steps or held.reported_tokens:
                assert largest.get(name, 0) <= len(heap.req_to_blocks[name]) * heap.kv_cache_spec.pages_per_block

    def check_end(self):
        """No block and no page is lost."""
        pool = self.scheduler.kv_cache_manager.block_pool
        assert not self.connector.manager.held and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        for free, num_pages in self.engine.collective_rpc("free_pages"):
            assert sorted(free) == list(range(num_pages))


def run(engine, prompts, observed, num_new, aborted):
    """Feed prompts as they arrive, and abort some ten steps later; return the tokens of all others."""
    sampling = VllmSamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    tokens, step = {}, 0
    while step <= max(ARRIVALS) or engine.has_unfinished_requests():
        for i in {*ARRIVALS.get(step, [])} & {*range(len(prompts))}:
            engine.add_request(str(i), TokensPrompt(prompt_token_ids=prompts[i]), sampling)
        engine.abort_request([str(i) for i in aborted if i in ARRIVALS.get(step - 10, [])])
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        observed.check_step()
        step += 1
    return [tokens.get(i) for i in range(len(prompts))]


def check_tokens(model, prompts, folder, monkeypatch, num_new=NUM_NEW, aborted=(), **options):
    """Compare the tokens of vLLM and of `Engine`, and the books after each step; return what was observed."""
    model.save_pretrained(folder)
    generations = Engine(model).generate(prompts, SamplingParams(max_new_tokens=num_new, temperature=0.0))
    engine = start(folder, monkeypatch, **options)
    observed = Observed(engine)
    found = run(engine, prompts, observed, num_new, aborted)
    for i, generation in enumerate(generations):
        assert found[i] == (None if i in aborted else generation.token_ids), i
    observed.check_end()
    hidden_sizes = engine.collective_rpc("hidden_sizes_without_requests", args=(5,))  # as vLLM measures a step's memory
    assert hidden_sizes == [[5, model.config.hidden_size]] * len(hidden_sizes)
    engine.engine_core.shutdown()
    return observed


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_equal_the_engines_under_a_mixed_load(name, make_compressed, make_prompts, tmp_path, monkeypatch):
    family, gates, options = VARIANTS[name]
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    model, prompts = make_compressed(family, gates=gates), make_prompts(*LENGTHS)
    observed = check_tokens(model, prompts, tmp_path, monkeypatch, aborted=[2], **options)
    if "own block size" not in name:  # these requests outgrow no block of 128 tokens
        assert len(observed.started) > len(prompts)  # some were preempted, and began again
    assert observed.differed == ("two ranks" in name)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton's interpreter: TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=")
def test_the_second_runner_over_tritons_kernels_has_the_same_tokens(
    make_compressed, make_prompts, tmp_path, monkeypatch
):
    """What vLLM and `dmc` run on a GPU by default, its kernels by Triton's interpreter."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(model_module, "choose_backend", lambda *_: load_backend("triton"))
    model, prompts = make_compressed("qwen3", gates={"action": "drop", "delay": 5}), make_prompts(5, 40, 1)
    observed = check_tokens(model, prompts, tmp_path, monkeypatch, num_new=4, async_scheduling=True)
    assert "gpu.model_runner" in observed.runner


REFUSED = {
    "LoRA": {"enable_lora": True},
    "speculative decoding": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "pipeline parallelism": {"pipeline_parallel_size": 2},
    "context parallelism": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "kv_cache_dtype='fp8'": {"kv_cache_dtype": "fp8"},
    "quantization='fp8'": {"quantization": "fp8"},
    "prompt embeddings": {"enable_prompt_embeds": True},
    "load_format='dummy'": {"load_format": "dummy"},
    "a kv_connector of your own": {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
}
"""What is named by the one line, and what is asked for."""


def test_settings_that_are_not_served_are_refused_before_weights_are_read(make_compressed, tmp_path, caplog):
    make_compressed(group=1).save_pretrained(tmp_path)
    for named, asked in REFUSED.items():
        with pytest.raises(NotImplementedError) as refusal:
            engine_args(tmp_path, **asked).create_engine_config()
        assert str(refusal.value) == f"a model with learned gates is not served with {named}: leave it out"
    config = engine_args(tmp_path, enable_prefix_caching=True).create_engine_config()
    assert not config.cache_config.enable_prefix_caching and config.kv_transfer_config.kv_connector == "DMCConnector"
    assert len([record for record in caplog.records if record.message.startswith("prefix caching is off")]) == 1


def damage_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value}))


@pytest.mark.parametrize(
    ("family", "shape", "changes", "line"),
    [
        ("olmo3", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, {}, "layer 1 of this"),
        ("llama", {}, {"compression": None}, "has no compression, the settings of its gates"),
        ("llama", {}, {"num_hidden_layers": 3}, r"lacks the weight model\.layers\.2"),
    ],
)
def test_folders_that_are_not_served_are_refused_before_weights_are_read(
    family, shape, changes, line, make_compressed, tmp_path
):
    make_compressed(family, **shape).save_pretrained(tmp_path)
    damage_config(tmp_path, **changes)
    with pytest.raises(Exception, match=line) as refusal:
        engine_args(tmp_path).create_engine_config()
    assert isinstance(refusal.value, NotImplementedError | RuntimeError | ValueError)


def test_vllms_table_of_settings_by_architecture_is_as_we_use_it():
    assert MODELS_CONFIG_MAP["DMCLlamaForCausalLM"] is plugin.CompressedModelConfig
    assert all(issubclass(kind, VerifyAndUpdateConfig) for kind in MODELS_CONFIG_MAP.values())
    assert extract_layer_index(LAYER_NAME) == 0


@pytest.fixture
def adapter(make_stock, make_compressed, tmp_path):
    """Write gates and their base into two folders."""
    base, folder = tmp_path / "base", tmp_path / "gates"
    folder.mkdir()
    make_stock().save_pretrained(base)
    model = make_compressed(gates={"gate_input": "hidden", "action": "drop", "delay": 3})
    save_gates(model, folder, Base.of(str(base), base))
    return folder


def test_gates_alone_are_served_with_their_base(adapter, make_prompts, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    prompts, num_new = make_prompts(5, 70, 33), 24
    sampling = SamplingParams(max_new_tokens=num_new, temperature=0.0)
    expected = Engine(load_model(adapter)).generate(prompts, sampling)
    engine, found = start(adapter, monkeypatch), {}
    asked = VllmSamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False, logprobs=0)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), asked)
    while engine.has_unfinished_requests():
        found |= {int(output.request_id): output.outputs[0] for output in engine.step() if output.finished}
    engine.engine_core.shutdown()
    for number, generation in enumerate(expected):
        tokens = list(found[number].token_ids)
        assert tokens == generation.token_ids
        logprobs = [step[token].logprob for step, token in zip(found[number].logprobs, tokens, strict=True)]
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(generation.logprobs), atol=1e-4, rtol=1e-4)


def test_gates_on_another_base_are_refused_before_weights_are_read(adapter, make_stock):
    make_stock(seed=1).save_pretrained(adapter.with_name("base"))
    with pytest.raises(RuntimeError, match="put back that base") as refusal:
        engine_args(adapter).create_engine_config()
    assert "\n" not in str(refusal.value)
