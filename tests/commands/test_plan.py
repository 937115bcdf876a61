import pytest
from transformers import AutoConfig

from dmc.commands.plan import CapacityConfig, print_capacity

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048,
}  # fmt: skip
WINDOWS = {"layer_types": [*["sliding_attention"] * 3, "full_attention"], "sliding_window": 100}


@pytest.mark.parametrize(("family", "options"), [("qwen3", {}), ("olmo3", WINDOWS)])
def test_the_ratio_of_a_model_with_windows_is_told_twice(family, options, tmp_path, capsys):
    AutoConfig.for_model(family, **SHAPE | options).save_pretrained(tmp_path)
    print_capacity(CapacityConfig(model=str(tmp_path), gpu=1.0, context=1000, ratios=[1.0, 5.0]))
    said = capsys.readouterr().out
    whole, of_five = 1000 + 3 * 100, 200 + 3 * 100
    of_all = "CR is that of 1 of 4 layers, which attend to all tokens. Of all keys and values of 1,000 tokens it is "
    of_all += f"1.00 at CR 1, {whole / of_five:.2f} at CR 5."
    assert (of_all in said) == bool(options) and "CR is that of" not in said.replace(of_all, "")
