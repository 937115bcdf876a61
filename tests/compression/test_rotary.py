import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dmc.compression import rotate
from dmc.compression.rotary import neuron_scale

HEAD_DIM = 16


@pytest.fixture
def tables():
    angles = torch.arange(7)[:, None] * 100.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.cat((angles, angles), dim=-1)[None]
    return angles.cos(), angles.sin()


def states(seed):
    return torch.randn(2, 4, 7, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


def test_rotation_is_that_of_the_stock_models(tables):
    query, key = apply_rotary_pos_emb(states(0), states(1), *tables)
    torch.testing.assert_close(rotate(states(0), *tables), query, rtol=0, atol=0)
    torch.testing.assert_close(rotate(states(1), *tables), key, rtol=0, atol=0)


@pytest.mark.parametrize("neuron", [0, 5, HEAD_DIM - 1])
def test_scaled_tables_remove_the_neuron_after_rotation_and_change_nothing_else(neuron, tables):
    scale = neuron_scale(HEAD_DIM, neuron, 0.0, torch.empty(0))
    without = states(0) * scale
    rotated = rotate(without, *tables)
    assert rotated[..., 1:, neuron].abs().min() > 0  # refilled from its partner
    removed = rotate(without, *(table * scale for table in tables))
    assert not removed[..., neuron].any()
    torch.testing.assert_close(removed, rotated * scale, rtol=0, atol=0)


def test_neuron_scale_takes_dtype_and_counts_from_the_end():
    scale = neuron_scale(4, -1, 0.25, torch.empty(0, dtype=torch.bfloat16))
    assert scale.dtype == torch.bfloat16
    assert scale.tolist() == [1, 1, 1, 0.25]
