"""The recipes of docs/extending.md that change the package itself, followed in a copy of it."""

import os
import re
import shutil
import subprocess
import sys

from documents import PAGES, ROOT

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


def test_a_family_is_a_line_and_a_backend_a_file(tmp_path):
    shutil.copytree(ROOT / "dmc", tmp_path / "dmc", ignore=shutil.ignore_patterns("__pycache__", "demo_models"))
    page = PAGES[ROOT / "docs" / "extending.md"]
    line = re.search(r"`(\"\w+\",)`", page)[1]
    table = tmp_path / "dmc/models/families.py"
    table.write_text(table.read_text().replace(f" {line}", "").replace("TABLE = (\n", f"TABLE = (\n    {line}\n"))
    backend = page.split("## A kernel backend\n")[1]
    (tmp_path / "dmc/kernels/foo.py").write_text(re.search(r"```python\n(.*?)```", backend, flags=re.S)[1])
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
