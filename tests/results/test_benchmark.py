import math

import pytest
import torch
from scripts_here import run_script

from dmc import retrofit
from dmc.commands.benchmark import benchmark
from dmc.compression import CompressionConfig
from dmc.models.build import random_model, twin
from dmc.results.benchmark import BenchmarkConfig, EngineDecoder, random_prompts, run_benchmark, time_interleaved
from dmc.results.measurement import new_row, to_frame
from dmc.results.report import read_folders
from dmc.results.store import Store, read_rows
from dmc.results.tables import format_tables, speeds_of, write_tables

SHAPE = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def make_config(**changes):
    options = {"prompt_length": 256, "batch_sizes": [2], "new_tokens": 4, "rounds": 2, **changes}
    return BenchmarkConfig(shape=SHAPE, **options)


def test_decoders_are_measured_at_their_ratios():
    config = make_config(ratios=[1.0, 4.0], delay=4, memory=2 * 4 * 256 * 2 * 16 * 4 * 3)
    stock = random_model(SHAPE, torch.float32, "cpu")
    models = {1.0: twin(stock), 4.0: retrofit(twin(stock), CompressionConfig(delay=4))}
    rows = list(run_benchmark(config, models, twin(stock)))
    full, compressed, _ = rows[:3]
    assert [row["requested_ratio"] for row in rows[:3]] == [1.0, 4.0, 1.0]
    assert full["achieved_ratio"] == 1.0
    assert compressed["achieved_ratio"] == pytest.approx(4.0, rel=0.15)
    head = 2 * 16 * 4  # key and value of one entry
    held = [row["peak_bytes_allocated"] for row in rows[:3]]
    assert held[2] == 2 * 2 * 2 * (256 + 4 + 2) * head
    assert 2 * 2 * 2 * 256 * head <= held[0] < 1.2 * held[2] and held[1] < 0.5 * held[0]
    speeds = [row["metrics"] for row in rows[:3]]
    assert all(
        speed["token_seconds"] > 0 and speed["tokens_per_second"] == 2 / speed["token_seconds"] for speed in speeds
    )
    largest = {row["requested_ratio"]: row["metrics"]["largest_batch"] for row in rows[3:]}
    assert largest[4.0] > 2 * largest[1.0]
    (table,) = format_tables(to_frame(rows))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert len(lines) == 2 + len(rows) and lines[4][:3] == ["hugging face, static cache", "256", "2"]
    gain = f"{speeds[1]['tokens_per_second'] / speeds[2]['tokens_per_second']:.2f}"
    assert dict(zip(lines[0], lines[3], strict=True))["gain"] == gain and lines[4][7] == "1.00"


def test_a_twin_shares_weights_and_nothing_else():
    stock = random_model({**SHAPE, "tie_word_embeddings": True}, torch.float32, "cpu")
    other = twin(stock)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert other.model.layers[0].mlp.up_proj.weight.data_ptr() == stock.model.layers[0].mlp.up_proj.weight.data_ptr()
    tokens = torch.arange(9)[None]
    torch.testing.assert_close(other(tokens).logits, stock(tokens).logits, rtol=0, atol=0)
    other.config.rms_norm_eps = 7.0
    assert stock.config.rms_norm_eps != 7.0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make_config(new_tokens=1, rounds=2), "cannot be divided among rounds=2"),
        (BenchmarkConfig, r"give model=DIR .* or shape"),
        (lambda: BenchmarkConfig("somewhere", dtype="float99"), r"dtype='float99': expected 'float32'"),
        (lambda: make_config(kv_cache_dtype="int4"), r"kv_cache_dtype='int4': expected 'auto' or 'int8'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_the_script_stores_rows_and_table(tmp_path, capsys):
    shape = ",".join(f"{key}:{value}" for key, value in SHAPE.items())
    command = ["benchmark.py", "prompt_length=64", "batch_sizes=[1,2]", "ratios=[1,2]"]
    command += ["new_tokens=2", "rounds=2", f"shape={{{shape}}}", f"output={tmp_path / 'out'}"]
    assert run_script(*command) == ""
    rows = Store(tmp_path / "out" / "cells.jsonl").rows()
    assert len(rows) == 6 and "scripts/benchmark.py" in rows[0]["provenance"]["command"]
    assert run_script(*command, "rounds=1") == ""  # of both: what a command has measured stays in the tables
    printed = (tmp_path / "out" / "table.md").read_text()
    assert printed.strip() in capsys.readouterr().out and len(printed.splitlines()) == 14
    assert len(Store(tmp_path / "out" / "cells.jsonl").rows()) == 12
    assert "ratios[0]=0.5: expected greater than or equal to 1" in run_script(*command, "ratios=[0.5]")


def test_a_model_with_gates_is_refused(folders, tmp_path):
    command = ["benchmark.py", f"model={folders.compressed}", "prompt_length=16", "hugging_face=false"]
    error = run_script(*command, f"output={tmp_path / 'out'}")
    assert error == f"error: model={folders.compressed} has gates: give its base; ratios are of synthetic gates"
    assert not (tmp_path / "out").exists()


def test_pages_of_8_bits_are_measured_as_such():
    model = random_model(SHAPE, torch.float32, "cpu")
    configs = [make_config(ratios=[1.0], memory=2**20, kv_cache_dtype=dtype) for dtype in ("auto", "int8")]
    (full, few), (small, many) = (list(run_benchmark(config, {1.0: model})) for config in configs)
    assert small["peak_bytes_allocated"] < 0.4 * full["peak_bytes_allocated"]  # 16 + 4 bytes of 16 * 4
    assert many["metrics"]["largest_batch"] > 2 * few["metrics"]["largest_batch"]
    assert [row["settings"]["task"]["kv_cache_dtype"] for row in (full, small)] == ["auto", "int8"]


@pytest.mark.parametrize("ratio", [1.0, 2.0, 8.0])
def test_a_memory_for_one_sequence_suffices_and_less_is_refused_before_the_clock_starts(ratio, tmp_path):
    values = {"shape": SHAPE, "prompt_length": 512, "new_tokens": 4, "rounds": 2, "batch_sizes": [1]}
    values |= {"ratios": [ratio], "hugging_face": False, "output": str(tmp_path / "out")}
    needed = 2 * 2 * math.ceil(516 / ratio / 16) * 16 * 2 * 16 * 4  # layers, heads, blocks, slots, bytes of a slot
    message = f"memory={needed - 1} holds no sequence of 516 tokens at CR {ratio:g}: give at least {needed} bytes"
    with pytest.raises(ValueError, match=message):
        benchmark(values | {"memory": needed - 1})
    assert not (tmp_path / "out").exists()
    benchmark(values | {"memory": needed if ratio == 1 else needed * 5 // 4})  # random decisions: about the ratio
    assert Store(tmp_path / "out" / "cells.jsonl").rows()[-1]["metrics"] == {"largest_batch": 1}


def test_speeds_of_two_devices_and_of_two_folders_are_all_shown(tmp_path, monkeypatch):
    """Two machines with the same GPU, one of which has measured on its CPU too, and on its GPU twice."""
    model, config = random_model(SHAPE, torch.float32, "cpu"), make_config(ratios=[1.0], memory=2**20)
    measured = [("one", "cpu"), ("one", "NVIDIA H100"), ("one", "NVIDIA H100"), ("two", "NVIDIA H100")]
    for folder, device in measured:
        monkeypatch.setattr("dmc.results.benchmark.device_name", lambda _, device=device: device)
        for row in run_benchmark(config, {1.0: model}):
            Store(tmp_path / folder / "cells.jsonl").append(row)
    found = read_folders([tmp_path / "one", tmp_path / "two"])
    devices = ["cpu", "NVIDIA H100", "NVIDIA H100"]
    assert found.speeds["task"].tolist() == [f"speed (device={device})" for device in devices for _ in (1, 2)]
    assert found.speeds["source"].tolist() == [1, 1, 2, 2, 3, 3]
    assert [source["machine"].partition(",")[0] for source in found.sources] == devices
    assert found.speeds["gain"].dropna().tolist() == [1.0] * 3


def test_models_that_decode_in_turns_are_divided_by_the_first(tmp_path):
    """The full cache of a base, then gates: what an audit measures; twice into one folder, with another dtype."""
    store = Store(tmp_path / "cells.jsonl")
    for dtype in ("float32", "bfloat16"):
        model = random_model(SHAPE, getattr(torch, dtype), "cpu")
        configs = [make_config(prompt_length=16, model=name, dtype=dtype) for name in ("A/base", "B/gates")]
        prompts = random_prompts(model, 2, configs[0])
        names = ("engine: base, full", "engine: gates, learned")
        of_both = zip(configs, names, strict=True)
        decoders = [EngineDecoder(model, 1.0, prompts, config, name=name) for config, name in of_both]
        for row in time_interleaved(decoders, 2):
            store.append(row)
    rows = read_rows([store])
    assert [row["model"] for row in rows[::2]] == ["A/base (dtype=float32)", "A/base (dtype=bfloat16)"]
    speeds = [row["metrics"]["tokens_per_second"] for row in rows]
    gains = [1.0, speeds[1] / speeds[0], 1.0, speeds[3] / speeds[2]]
    found = speeds_of(to_frame(rows))
    assert found["gain"].tolist() == pytest.approx(gains) and {*found["task"]} == {"speed"}


def test_speeds_of_other_models_and_settings_are_not_divided_by_each_other(tmp_path):
    store = Store(tmp_path / "cells.jsonl")
    measured = ("A", "float32", 10.0, 30.0), ("A", "bfloat16", 40.0, 60.0), ("B", "float32", 100.0, 200.0)
    for model, dtype, *speeds in measured:
        for policy, speed in zip(("hugging face, static cache", "engine"), speeds, strict=True):
            figures = {"metrics": {"tokens_per_second": speed, "token_seconds": 1 / speed}, "achieved_ratio": 1.0}
            settings = {"model": {"dtype": dtype}}
            store.append(new_row(model, policy, "speed", settings, coordinates={"batch": 1, "length": 8}, **figures))
    lines = [line.split(" | ") for line in write_tables(store, tmp_path).splitlines()[2:]]
    gains = {"A (dtype=float32)": ["1.00", "3.00"], "A (dtype=bfloat16)": ["1.00", "1.50"], "B": ["1.00", "2.00"]}
    assert [(line[1], line[-1].removesuffix(" |")) for line in lines] == [
        (model, gain) for model, given in gains.items() for gain in given
    ]
