"""Two gloo processes serve what one does: the same tokens, decisions and bytes."""

import json

import pytest
import torch
from launching import Processes
from serving import carry_shard, replay_shard, report, sample_with_noise, serve_one_by_one, serve_shard
from transformers import AutoConfig, AutoModelForCausalLM

from dmc import Engine, SamplingParams
from dmc.models.tensor_parallel import load_shard, shard_model
from dmc.ranks import Ranks

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9] * 5, [11, 12, 13], [70, 3, 70, 3, 70, 3, 5] * 3]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
PARAMS = [
    SamplingParams(max_new_tokens=40, temperature=0.0),
    SamplingParams(max_new_tokens=30, temperature=0.8, seed=3),
    SamplingParams(max_new_tokens=20, temperature=1.0, top_k=5, seed=4),
]


def answers(out):
    return [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(2)]


SERVED = {
    "llama with biases, delayed": ("llama", {"attention_bias": True}, {"delay": 4}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}, {}),
    "llama per layer, adapted": ("llama", {}, {"decisions": "per_layer", "gate_input": "both", "delay": 2}),
    "qwen3_moe": ("qwen3_moe", EXPERTS, {"delay": 2}),
    "glm4, which turns some channels, neighbors": ("glm4", {"pad_token_id": 2}, {}),
}
SERVED_TOO = {
    "qwen3 drop": ("qwen3", {}, {"action": "drop", "delay": 3}),
    "stock mistral": ("mistral", {}, None),
    "stock qwen3_moe": ("qwen3_moe", EXPERTS, None),
}


@pytest.mark.parametrize(
    ("family", "changes", "gates"),
    [*SERVED.values(), *(pytest.param(*case, marks=pytest.mark.slow) for case in SERVED_TOO.values())],
    ids=[*SERVED, *SERVED_TOO],
)
def test_two_ranks_give_the_tokens_of_one(family, changes, gates, make_stock, make_compressed, tmp_path):
    model = make_stock(family, **changes) if gates is None else make_compressed(family, gates=gates, **changes)
    model.save_pretrained(tmp_path / "model", max_shard_size="40KB")
    engine = Engine(model, max_batch_size=3)
    alone = report(engine, engine.generate(PROMPTS, PARAMS))
    arguments = (tmp_path / "model", None, PROMPTS, PARAMS, tmp_path / "out")
    with Processes(serve_shard, arguments, 2, log := tmp_path / "log") as ranks:
        assert ranks.join() == [0, 0], log.read_text()[-3000:]
    for found in answers(tmp_path / "out"):
        shape = found.pop("shape")
        assert shape == [model.model.layers[0].self_attn.k_proj.weight.shape[0] // 2, model.config.hidden_size]
        torch.testing.assert_close(found.pop("logprobs"), alone["logprobs"], rtol=0, atol=1e-4)
        assert found == {key: value for key, value in alone.items() if key != "logprobs"}


def test_two_ranks_share_prefixes_and_forks_alike(make_compressed, make_prompts, tmp_path):
    model, (prefix,) = make_compressed(gates={"delay": 4}), make_prompts(70)
    model.save_pretrained(tmp_path / "model")
    prompts = [prefix + rest for rest in make_prompts(5, 9, 300, seed=2)]
    params = [SamplingParams(max_new_tokens=12, seed=number, n=1 + number) for number in range(3)]
    engine = Engine(model, max_batch_size=3)
    alone = report(engine, engine.generate(prompts, params))
    arguments = (tmp_path / "model", None, prompts, params, tmp_path / "out")
    with Processes(serve_shard, arguments, 2, log := tmp_path / "log") as ranks:
        assert ranks.join() == [0, 0], log.read_text()[-3000:]
    for found in answers(tmp_path / "out"):
        same = ("tokens", "others", "slots", "blocks")
        assert [found[name] for name in same] == [alone[name] for name in same]


def test_two_ranks_carry_a_cache_together_or_not_at_all(make_compressed, make_prompts, tmp_path):
    model, (context, question) = make_compressed(gates={"delay": 4}), make_prompts(70, 9)
    model.save_pretrained(tmp_path / "model")
    arguments = (tmp_path / "model", cache := tmp_path / "cache", [context, question], tmp_path / "out")
    with Processes(carry_shard, arguments, 2, log := tmp_path / "log") as ranks:
        assert ranks.join() == [0, 0], log.read_text()[-3000:]
    (alone,) = Engine(model).generate([context + question], SamplingParams(max_new_tokens=12, temperature=0))
    for expected, tokens, refusal, blocks in answers(tmp_path / "out"):
        assert tokens == expected == alone.token_ids and blocks == 0
        assert str(cache / "rank-1-of-2") in refusal
    with pytest.raises(FileNotFoundError, match="holds no saved cache"):
        Engine(model).load(cache)


def test_pools_of_two_ranks_do_not_grow_for_prefixes(make_compressed, make_prompts, tmp_path):
    make_compressed().save_pretrained(tmp_path / "model")
    arguments = (tmp_path / "model", make_prompts(*[400] * 40), tmp_path / "out")
    with Processes(serve_one_by_one, arguments, 2, log := tmp_path / "log") as ranks:
        assert ranks.join() == [0, 0], log.read_text()[-3000:]
    for blocks, held in answers(tmp_path / "out"):
        assert blocks <= 512 and held > 0


def test_ranks_agree_on_whom_to_preempt(make_compressed, tmp_path):
    model = make_compressed(gates={"delay": 4, "decision_offset": 1.0})
    model.save_pretrained(tmp_path / "model")
    engine = Engine(model, max_batch_size=3)
    alone = report(engine, engine.generate(PROMPTS, PARAMS))
    arguments = (tmp_path / "model", 2 * 6 * 16 * 2 * 16 * 4, PROMPTS, PARAMS, tmp_path / "out")
    with Processes(serve_shard, arguments, 2, log := tmp_path / "log") as ranks:
        assert ranks.join() == [0, 0], log.read_text()[-3000:]
    first, second = answers(tmp_path / "out")
    assert first["preemptions"] > 0
    assert first == second
    assert (first["tokens"], first["slots"]) == (alone["tokens"], alone["slots"])


def test_ranks_share_the_tokens_that_the_first_one_draws(make_stock, tmp_path):
    make_stock().save_pretrained(tmp_path / "model")
    params = [
        SamplingParams(max_new_tokens=30, temperature=1.0),
        SamplingParams(max_new_tokens=30, temperature=0.7, top_k=9, seed=3),
        SamplingParams(max_new_tokens=30, temperature=0.0),
    ]
    arguments = (tmp_path / "model", PROMPTS, params, tmp_path / "out")
    with Processes(sample_with_noise, arguments, 2, tmp_path / "log") as ranks:
        assert ranks.join() == [0, 0], (tmp_path / "log").read_text()[-3000:]
    first, second = answers(tmp_path / "out")
    assert first == second
    assert [len(tokens) for tokens, _ in first] == [30, 30, 30]


@pytest.mark.parametrize(("local_rank", "num_devices", "expected"), [(1, 2, 1), (0, 2, 0), (3, 1, 0)])
def test_every_rank_works_on_a_gpu_of_its_own(local_rank, num_devices, expected, monkeypatch):
    chosen = []
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    for name, value in {"is_available": True, "device_count": num_devices}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(f"device {device}"))
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", chosen.append)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: local_rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    Ranks.init_process_group()
    assert chosen == [f"device {expected}", "nccl"]


def test_heads_that_cannot_be_divided_are_refused(make_stock):
    with pytest.raises(ValueError, match="num_key_value_heads=2 cannot be divided among 3 ranks evenly"):
        shard_model(make_stock(), Ranks(0, 3))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("phi", r"layer 0 of this phi model has self_attn\.dense\.weight, which is not known to be divided"),
        ("gpt2", r"layer 0 of this gpt2 model is not known to be divided by heads: expected model\.layers"),
    ],
)
def test_an_attention_that_is_unknown_is_not_divided(family, message):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 83}
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        shard_model(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)), Ranks(0, 2))


def test_loading_a_shard_alone_says_how_to_start(tmp_path):
    with pytest.raises(RuntimeError, match="start them with torchrun"):
        load_shard(tmp_path)


@pytest.mark.parametrize(
    ("gates", "noise"),
    [({"delay": 4}, 0.0), ({}, 0.05)],
    ids=["delay 4", "ranks that differ"],
)
def test_two_ranks_replay_recorded_steps_with_the_tokens_of_one(gates, noise, make_compressed, tmp_path):
    model = make_compressed(gates=gates)
    model.save_pretrained(tmp_path / "model")
    engine = Engine(model, kernels="reference", max_batch_size=4)
    alone = report(engine, engine.generate(PROMPTS, PARAMS))
    arguments = (tmp_path / "model", PROMPTS, PARAMS, noise, tmp_path / "out")
    with Processes(replay_shard, arguments, 2, log := tmp_path / "log") as ranks:
        assert ranks.join() == [0, 0], log.read_text()[-3000:]
    first, second = answers(tmp_path / "out")
    assert first == second
    assert first.pop("num_replayed") > 20 and first["blocks"] == 0
    if not noise:
        torch.testing.assert_close(first.pop("logprobs"), alone.pop("logprobs"), rtol=0, atol=1e-4)
        assert {name: first[name] for name in ("tokens", "slots", "ratios")} == {
            name: alone[name] for name in ("tokens", "slots", "ratios")
        }
