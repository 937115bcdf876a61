"""The recipes of docs/extending.md that change the package itself, followed in a copy of it."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest
import transformers
from conftest import build_stock
from documents import PAGES, ROOT

import dmc.kernels
from dmc import Engine, SamplingParams

PAGE = PAGES[ROOT / "docs" / "extending.md"]
LINE = re.search(r"`(\"\w+\",)`", PAGE)[1]
BACKEND = re.search(r"```python\n(.*?)```", PAGE.split("## A kernel backend\n")[1], flags=re.S)[1]

USE = """
import torch
from transformers import ArceeConfig, ArceeForCausalLM
import dmc, dmc.kernels
from dmc.compression import CompressionConfig

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
stock = ArceeForCausalLM(ArceeConfig(**sizes, num_key_value_heads=2, max_position_embeddings=128)).eval()
prompt = torch.randint(3, 60, (1, 40))
expected = stock.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 40:].tolist()
greedy = dmc.SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)


def tokens(model, **options):
    return dmc.Engine(model, **options).generate(prompt.tolist(), greedy)[0]


gates = CompressionConfig(gate_input="hidden", action="drop", delay=4)
closed = dmc.retrofit(stock, gates)  # adapters begin at zero: nothing is dropped
assert type(closed).__name__ == "DMCArceeForCausalLM"
assert tokens(closed).token_ids == expected
for adapter in closed.adapters():
    torch.nn.init.normal_(adapter.weight, std=2.0)
    torch.nn.init.constant_(adapter.bias, 5.0)
assert tokens(closed).stats.achieved_ratio > 1.1
assert tokens(stock, kernels="reference").token_ids == expected

dmc.kernels.BACKENDS += ("foo",)
calls, mine = [], dmc.kernels.load_backend("foo")
attend = mine.paged_attention
mine.paged_attention = lambda *others, **options: calls.append(1) or attend(*others, **options)
assert tokens(stock, kernels="foo").token_ids == expected and calls
"""


def test_a_backend_is_a_file_that_says_what_differs_from_the_reference(tmp_path, monkeypatch):
    (tmp_path / "foo.py").write_text(BACKEND)
    spec = importlib.util.spec_from_file_location("dmc.kernels.foo", tmp_path / "foo.py")
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    monkeypatch.setitem(sys.modules, "dmc.kernels.foo", mine)
    monkeypatch.setattr(dmc.kernels, "BACKENDS", (*dmc.kernels.BACKENDS, "foo"))
    calls, attend, greedy = [], mine.paged_attention, SamplingParams(max_new_tokens=4, temperature=0.0)
    monkeypatch.setattr(mine, "paged_attention", lambda *given, **options: calls.append(1) or attend(*given, **options))
    engines = [Engine(build_stock(), kernels=kernels) for kernels in ("reference", "foo")]
    expected, found = (engine.generate([[5, 6, 7] * 9], greedy)[0].token_ids for engine in engines)
    assert found == expected and calls


def test_the_line_of_a_family_is_in_the_table_and_names_stock_classes():
    name = LINE.strip('",')
    assert LINE in (ROOT / "dmc/models/families.py").read_text()
    assert hasattr(transformers, f"{name}ForCausalLM") and hasattr(transformers, f"{name}Config")


@pytest.mark.slow
def test_a_family_is_a_line_and_a_backend_a_file(tmp_path):
    shutil.copytree(ROOT / "dmc", tmp_path / "dmc", ignore=shutil.ignore_patterns("__pycache__", "demo_models"))
    table = tmp_path / "dmc/models/families.py"
    table.write_text(table.read_text().replace(f" {LINE}", "").replace("TABLE = (\n", f"TABLE = (\n    {LINE}\n"))
    (tmp_path / "dmc/kernels/foo.py").write_text(BACKEND)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
