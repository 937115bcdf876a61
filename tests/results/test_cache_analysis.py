"""What the task `cache_analysis` tells of a cache: the oracle's survivors of every method, the gates' own decisions."""

import pytest
import torch
from oracles.policies import run
from oracles.step_by_step import ModelOracle
from report_rows import run_grid

from dmc import Engine, policies
from dmc.budget import Budget
from dmc.data import TextSource
from dmc.results.plots import draw_places
from dmc.results.report import read_folders, write_page
from dmc.results.tasks import CacheAnalysis, Sample, by_coordinates
from dmc.results.tasks.cache_analysis import NUM_BINS, decisions_of

GATES = [{"action": "merge", "delay": 0}, {"action": "merge", "delay": 4}, {"action": "drop", "delay": 3}]
METHODS = [
    ("H2O", {}), ("TOVA", {}), ("StreamingLLM", {}), ("SnapKV", {"window": 4}), ("PyramidKV", {"window": 4}),
    ("AdaKV", {"window": 4}), ("D2O", {}),
]  # fmt: skip


def tables(engine, prompts, new_tokens=1):
    task = CacheAnalysis(source=TextSource("unread"), new_tokens=new_tokens)
    return by_coordinates(task.evaluate(engine, [Sample(prompt, []) for prompt in prompts]))


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_what_is_held_is_what_the_oracle_holds(method, options, make_stock, make_prompts):
    model, prompts, budget, new_tokens = make_stock(num_layers=3), make_prompts(29, 29), {"ratio": 2}, 3
    engine = Engine(model, policy=getattr(policies, method)(budget=Budget(**budget), **options), kernels="reference")
    found = tables(engine, prompts, new_tokens)["by_position_and_layer"]
    assert engine.blocks_in_use == 0 and found["position"] == [*range(28 + new_tokens)]
    held = torch.zeros(28 + new_tokens, 3)
    for prompt in prompts:
        answer = []  # as the oracle continues
        for _ in range(new_tokens):
            answer.append(int(run(model, method, prompt, [*answer, 0], budget, **options).log_probs[-1].argmax()))
        trace = run(model, method, prompt, answer, budget, **options)
        for layer, heads in enumerate(trace.positions):
            for head in heads:
                held[head, layer] += 1 / len(heads) / len(prompts)
    torch.testing.assert_close(torch.tensor(found["share_held"]), held)


@pytest.mark.parametrize("gates", GATES, ids=["merge", "delayed merge", "delayed drop"])
def test_what_gates_hold_are_the_algorithms_decisions_token_by_token(
    gates, make_stock, make_compressed, make_gates, make_prompts
):
    model, prompts, delay = make_compressed(gates=gates), make_prompts(24, 24), gates["delay"]
    oracle = ModelOracle(make_stock(), make_gates(**gates))
    decisions = torch.stack([oracle.run(prompt).decisions for prompt in prompts], dim=1)  # [L, B, H, T]
    for index, prompt in enumerate(prompts):
        assert torch.equal(decisions_of(model, prompt).long(), decisions[:, index])
    found = tables(Engine(model), prompts)
    waits = torch.arange(24) >= 24 - delay
    held = ((decisions == 0) | waits).float().mean((1, 2)).T
    torch.testing.assert_close(torch.tensor(found["by_position_and_layer"]["share_held"]), held)
    segments = torch.tensor(found["by_segment_length_and_layer"]["segments"])
    for layer, row in zip(decisions[..., : 24 - delay], segments.T, strict=True):
        lengths = [length for head in layer.flatten(0, 1).tolist() for length in lengths_one_by_one(head)]
        assert row.tolist() == [lengths.count(length) / 2 for length in range(1, NUM_BINS + 1)]
    engine = Engine(model)
    for length, shares in zip(*(found["by_tokens_and_layer"][name] for name in ("tokens", "share_held")), strict=True):
        scorings = engine.score_with_stats([prompt[:length] for prompt in prompts], [[0]] * 2)
        slots = torch.stack([scoring.stats.slots.float() for scoring in scorings])
        torch.testing.assert_close(torch.tensor(shares), slots.mean((0, 2)) / length)


def lengths_one_by_one(decisions):
    """Walk along one head's decisions."""
    lengths = []
    for decision in decisions:
        if decision and lengths:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def test_long_texts_are_told_in_so_many_places(make_compressed, make_prompts):
    found = tables(Engine(make_compressed(gates=GATES[0])), make_prompts(NUM_BINS * 2 + 7))
    by_position, by_tokens = found["by_position_and_layer"], found["by_tokens_and_layer"]
    assert len(by_position["position"]) == len(by_tokens["tokens"]) == 45 and by_position["position"][:3] == [0, 3, 6]
    torch.testing.assert_close(
        torch.tensor(by_position["share_held"]).mean(0), torch.tensor(by_tokens["share_held"])[-1]
    )


@pytest.mark.parametrize("case", ["reads fewer", "merges"])
def test_whose_tokens_are_not_known_is_refused(case, make_stock, make_compressed, make_prompts):
    if case == "merges":
        engine = Engine(make_compressed(), policy=policies.SnapKV(budget=Budget(ratio=2), window=4))
    else:
        engine = Engine(make_stock(num_layers=3), policy=policies.OmniKV(budget=Budget(ratio=4), filter_layers=[0]))
    with pytest.raises(ValueError, match="only for a stock model with an evicting policy"):
        tables(engine, make_prompts(20))
    assert engine.blocks_in_use == 0
    with pytest.raises(ValueError, match="LlamaForCausalLM has no gates"):
        decisions_of(make_stock(), [1, 2])
    begun = Engine(make_stock(), policy=policies.H2O(budget=Budget(ratio=2))).session()
    with begun as session, pytest.raises(ValueError, match="holds nothing: give it a turn first"):
        session.positions_held()


def test_a_grid_analyzes_caches_and_the_page_draws_it(make_config, folders, tmp_path):
    task = {"name": "held", "like": "cache_analysis", "num_samples": 3, "length": 48, "cache_folder": str(tmp_path)}
    task["source"] = {"_target_": "dmc.data.TextSource", "name": str(folders.text)}
    policy = {"name": "streaming", "like": "streaming_llm", "sinks": 2}
    models = {"base": str(folders.stock), "small": str(folders.compressed)}
    config = make_config(models=models, policies=["full", policy], budgets=["tokens:10"], tasks=[task])
    assert [row["status"] for row in run_grid(config).rows()] == ["done"] * 3
    findings = read_folders([tmp_path / "out"])
    held = findings.places[findings.places["metric"] == "share_held"]
    of_policy = held[held["label"] == "streaming at 10 tokens"]
    kept = of_policy[of_policy["value"] == 1]
    assert set(kept["position"]) == {0, 1, *range(40, 48)} and len(kept) == 20 and len(of_policy) == 2 * 48
    assert set(held[held["is_full"]]["value"]) == {1.0}
    learned = findings.places[findings.places["learned"]]
    assert set(learned["by"]) == {"layer head", "position layer", "tokens layer", "segment_length layer"}
    (plot,) = draw_places(learned[learned["by"] == "tokens layer"])
    assert "share held by tokens and layer" in plot.title and len(plot.axes.lines) == 3  # two layers, and all
    heads = learned[learned["by"] == "layer head"]
    assert heads["value"].max() > 1 and findings.summary.empty
    assert "No method was measured on a task" in write_page(findings, tmp_path / "page").read_text()
