"""Everything that serves, on a GPU that is none: an operation over two devices raises, as it would on a real one."""

import copy
from pathlib import Path

import pytest
from claimed_gpu import claim_model, claimed_gpu
from omegaconf import OmegaConf

from dmc import Engine, SamplingParams
from dmc.budget import Budget
from dmc.results.policies import policy_from_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "policy").glob("*.yaml"))
LIKE_OTHERS = ("ada_pyramidkv", "cam", "h2o", "infllm", "kvzip", "local_window", "marked", "omnikv", "pyramidkv")
LIKE_OTHERS += ("random", "streaming_llm", "vatp")
"""Slow: others, or variants of theirs, take the same ways."""
PLAIN = [
    pytest.param(
        OmegaConf.to_container(OmegaConf.load(path)),
        id=path.stem,
        marks=[pytest.mark.slow] * (path.stem in LIKE_OTHERS),
    )
    for path in CONFIGS
    if path.stem not in ("full", "kvpop")  # which needs a file
]
VARIANTS = [
    {"_target_": "dmc.policies.StreamingLLM", "sinks": 2, "rerotate": True},
    {"_target_": "dmc.policies.H2O", "protect": 0.1, "bounds": [3]},
    {"_target_": "dmc.policies.KVzip", "protect": 0.1, "bounds": [3]},
    {"_target_": "dmc.policies.OmniKV", "filter_layers": [0], "selector": "uniform"},
    {"_target_": "dmc.policies.OmniKV", "filter_layers": [0], "offload": True},
    {"_target_": "dmc.policies.InfLLM", "initial": 2, "local": 8, "block_size": 4, "chunk": 4},
]
SAMPLED = [
    SamplingParams(max_new_tokens=2, temperature=0),
    SamplingParams(max_new_tokens=2, temperature=0.8, top_k=9, top_p=0.9, seed=1),
]


def answers(engine, prompts):
    """Two requests beside each other, a scoring, and a conversation of two turns."""
    generations = engine.generate(prompts, SAMPLED)
    with engine.session() as session:
        generations += [session.generate(prompt, SAMPLED[0]) for prompt in prompts[::-1]]
    scores = engine.score(prompts[1:], [[3, 4]])
    return [
        *(
            [generation.token_ids, generation.stats.slots.tolist(), generation.stats.bytes_allocated]
            for generation in generations
        ),
        *(score.cpu().argmax(-1).tolist() for score in scores),
        engine.blocks_in_use,
    ]


def assert_same_on_a_gpu(model, prompts, **options):
    expected = answers(Engine(model, kernels="reference", **options), prompts)
    with claimed_gpu():
        engine = Engine(claim_model(copy.deepcopy(model)), kernels="reference", **options)
        assert engine.cache.fields["key_pages"].device.type == "cuda"
        assert answers(engine, prompts) == expected


@pytest.mark.parametrize("settings", [*PLAIN, *VARIANTS], ids=str)
@pytest.mark.filterwarnings("ignore:.*")
def test_policies_work_on_one_device(settings, make_stock, make_prompts):
    policy = policy_from_config(settings, Budget(ratio=2.5))
    assert_same_on_a_gpu(make_stock(), make_prompts(21, 9), policy=policy)


@pytest.mark.parametrize("gates", [None, {"delay": 3}, {"window_size": None}, {"action": "drop", "delay": 2}], ids=str)
def test_gates_work_on_one_device(gates, make_stock, make_compressed, make_prompts):
    model = make_stock() if gates is None else make_compressed(gates=gates)
    assert_same_on_a_gpu(model, make_prompts(11, 5), prefill_chunk_size=8, memory=200_000)
