"""Weights out of a folder as FSDP2 writes it; `test_strategies.py` joins those of several ranks."""

from __future__ import annotations

import torch
from torch.distributed import checkpoint

from dmc.training.checkpoints.joining import join_shards

SHAPES = {"model.embed.weight": (7, 3), "model.norm.weight": (5,), "model.head.weight": (4, 6)}


def test_weights_alone_are_read_and_a_bar_counts_their_bytes(tmp_path, capsys):
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    moments = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    state = {"state_dict": weights, "optimizer_0": {"state": moments, "step": 3}}
    checkpoint.save(state, checkpoint_id=tmp_path / "shards", no_dist=True)
    joined = join_shards(tmp_path / "shards")
    assert set(joined) == set(weights)
    for name, weight in joined.items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=0)
    size = sum(weight.nbytes for weight in weights.values())
    assert f"{size}/{size}" in capsys.readouterr().err.replace(".0", "").replace("B", "")
