import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from dmc.megatron.mapping import parts_of

SIZES = st.sampled_from([1, 2, 4])


@given(SIZES, SIZES, SIZES, st.integers(3, 40), st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_is_cut_joins_to_the_same_weights(tensor_size, per_rank, group, vocab_size, tied):
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=8 * tensor_size,
        num_hidden_layers=1,
        num_key_value_heads=tensor_size * per_rank,
        num_attention_heads=tensor_size * per_rank * group,
        head_dim=4,
        tie_word_embeddings=tied,
    )
    padded = -(-vocab_size // tensor_size) * tensor_size
    parts = list(parts_of(config, tensor_size, padded))
    assert len({name for part in parts for name in part.weights}) == (11 if tied else 12)
    for part in parts:
        weights = [torch.randn(shape) for shape in part.shapes]
        shards = [part.shard(weights, rank, tensor_size) for rank in range(tensor_size)]
        assert all(tuple(shard.shape) == part.shard_shape(tensor_size) for shard in shards)
        for expected, got in zip(weights, part.join(shards), strict=True):
            assert torch.equal(expected, got), part.name
