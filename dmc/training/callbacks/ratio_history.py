"""The compression ratio of every layer and KV head at each validation, as plain data."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

RATIOS_NAME = "ratios.jsonl"
"""One line per validation: the step, and the share of its tokens each head holds, layer by layer."""


class RatioHistory:
    """Lines of a file that outlives restarts: a step validated again counts as the later line says.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, held: Tensor) -> None:
        """Add the shares held after a step, [L, H]."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"step": step, "held": held.tolist()}) + "\n"
        with self.path.open("ab", buffering=0) as file:  # in one piece, whenever the run is killed
            file.write(line.encode())

    def read(self) -> tuple[list[int], Tensor]:
        """Return the steps in order and the shares held after each, [S, L, H]."""
        held: dict[int, Tensor] = {}
        for line in self.path.read_text().splitlines():
            row = json.loads(line)
            held[row["step"]] = torch.tensor(row["held"])
        steps = sorted(held)
        return steps, torch.stack([held[step] for step in steps])
