"""What decoding must do without. Who may import whom is checked by import-linter (`lint-imports`, pyproject.toml)."""

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN_IN_CORE = """
lightning pytorch_lightning hydra omegaconf datasets wandb deepspeed matplotlib lm_eval accelerate fastapi
uvicorn openai ray
""".split()


def test_core_serves_where_only_torch_and_transformers_are_installed():
    """And `import dmc` alone brings the families to the Auto* classes."""
    program = f"""
    import sys

    class Without:
        def __init__(self, finder):
            self.finder = finder

        def find_spec(self, name, path=None, target=None):
            hidden = name.split(".")[0] in {FORBIDDEN_IN_CORE!r}
            return None if hidden else self.finder.find_spec(name, path, target)

        def __getattr__(self, name):
            return getattr(self.finder, name)

    sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
    import dmc
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
    assert AutoConfig.for_model("dmc_llama", compression={{"action": "drop", "delay": 4}}).compression["delay"] == 4

    import torch
    from dmc import Engine, SamplingParams, retrofit
    from dmc.compression import CompressionConfig

    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, eos_token_id=None)
    model = retrofit(LlamaForCausalLM(config), CompressionConfig())
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    (generation,) = Engine(model).generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, temperature=0))
    assert len(generation.token_ids) == 4
    loaded = [name for name in sys.modules if name.split(".")[0] in {FORBIDDEN_IN_CORE!r}]
    assert not loaded, loaded
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr[-2000:]
