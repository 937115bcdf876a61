"""A naive float64 decoder from a stock Hugging Face model's weights; whoever calls it answers for the attention."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor, int], Tensor]


class Decoder:
    """Everything of a Llama-like model but attention, in float64.

    The norms and RoPE are spelled out: those of transformers compute in float32 whatever the model's dtype.
    """

    def __init__(self, model):
        self.model = copy.deepcopy(model).double().eval()
        self.layers = self.model.model.layers
        self.head_dim = self.layers[0].self_attn.head_dim
        self.num_kv_heads = model.config.num_key_value_heads
        self.group = model.config.num_attention_heads // self.num_kv_heads
        self.scaling = self.layers[0].self_attn.scaling

    @torch.no_grad()
    def feed(self, tokens, first_position, attend):
        """Run consecutive tokens through the model.

        Args:
            tokens: token ids.
            first_position: position of the first of them.
            attend: attention of one layer: (layer index, query [query_heads, time, head_dim], key and value
                [kv_heads, time, head_dim], before RoPE, first position) -> output, shape of the query.
        Returns:
            Log-probabilities after each token, float64, [time, vocab].
        """
        hidden = self.model.model.embed_tokens(torch.tensor(tokens))
        for index, layer in enumerate(self.layers):
            query, key, value = self.project(layer.self_attn, normalize(layer.input_layernorm, hidden))
            output = attend(index, query, key, value, first_position)
            hidden = hidden + layer.self_attn.o_proj(output.transpose(0, 1).flatten(1))
            hidden = hidden + layer.mlp(normalize(layer.post_attention_layernorm, hidden))
        return torch.log_softmax(self.model.lm_head(normalize(self.model.model.norm, hidden)), -1)

    def project(self, attention, hidden):
        """Return query [query_heads, time, head_dim], key and value [kv_heads, time, head_dim]."""
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            query, key = normalize(attention.q_norm, query), normalize(attention.k_norm, key)
        return query, key, value

    def rotate(self, states, position):
        """Apply RoPE to states [..., head_dim] at one position, or [..., time, head_dim] at positions [time]."""
        rotary = self.model.model.rotary_emb
        angles = torch.as_tensor(position, dtype=torch.float64)[..., None] * rotary.inv_freq
        cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
        first, second = states.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def normalize(norm, states):
    """Root-mean-square norm over the last dimension, with the weight of a module of transformers."""
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight
