"""Where a part of the check measures, and what it hands back: figures, which yield rows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timings import Case, device_medians, medians

ROOT = Path(__file__).resolve().parents[2]
CALLS = 20
"""Launches of a kernel that are timed together, so that what the host takes for one is not counted."""
Row = dict[str, Any]
Rows = Iterator[Row]


def row(measured: str, value: float | None, unit: str, beside: str = "", *, holds: bool | None = None) -> Row:
    """Describe one figure; `holds` says whether it is as it must be, None: it only tells."""
    return {"measured": measured, "value": value, "unit": unit, "beside": beside, "holds": holds}


def failure(measured: str, error: Exception) -> Row:
    """Describe a figure that an error took the place of."""
    return row(measured, None, "failed", " ".join(f"{type(error).__name__}: {error}".split())[:300], holds=False)


@dataclass(frozen=True)
class Figure:
    """One thing that is measured: if it fails, the others of its part still are."""

    name: str
    measure: Callable[[], Iterable[Row]]


@dataclass(frozen=True)
class Place:
    """Where a part measures, whether on little, and until when."""

    device: str
    is_tiny: bool
    model: str | None = None
    """Folder or GGUF file of SmolLM2-135M; None: see `runs.model_of`."""
    output: Path = Path("outputs/gpu_check")
    """Folder of the tables, logs and what is trained."""
    seconds: float = float("inf")
    """Time that the part has."""
    started: float = 0.0
    """Its start, by `time.monotonic`."""

    @property
    def seconds_left(self) -> float:
        """Return how long the part may still run."""
        return self.seconds - (time.monotonic() - self.started)

    @property
    def dtype(self) -> torch.dtype:
        """Return what models are served and kernels are timed in."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Return what results are compared in."""
        every = (torch.float32, torch.bfloat16, torch.float16)
        return every[:1] if is_interpreted() else every[: 2 if self.device == "cpu" else 3]

    @property
    def has_triton(self) -> bool:
        """Whether Triton's kernels run: on a GPU, or by Triton's interpreter, in float32."""
        return self.device == "cuda" or is_interpreted()

    def size(self, size: int, tiny: int) -> int:
        """Choose a size."""
        return tiny if self.is_tiny else size

    def shape(self, num_layers: int) -> dict[str, Any]:
        """Describe a model of a 7B's width, with 8 KV heads."""
        sizes = {"hidden_size": (4096, 64), "intermediate_size": (11008, 96), "vocab_size": (32000, 97)}
        heads = {"num_attention_heads": (32, 4), "num_key_value_heads": (8, 2)}
        return {
            "model_type": "llama", "num_hidden_layers": num_layers,
            **{name: pair[self.is_tiny] for name, pair in (sizes | heads).items()},
        }  # fmt: skip

    def milliseconds(
        self, cases: Mapping[str, Case], calls: int = 1, *, rounds: int = 9, recorded: bool = False
    ) -> dict[str, float]:
        """Give medians of cases that take turns, of a GPU by its own clock over so many calls each.

        `recorded`: the calls are replayed from a CUDA graph, so that a short kernel does not wait for its launches.
        """
        rounds, warm_up = self.size(rounds, 1), self.size(2, 0)
        if self.device == "cpu":
            return medians(dict(cases), rounds, warm_up=warm_up)
        return device_medians(cases, rounds, calls, warm_up=warm_up, recorded=recorded)

    def ceilings(self) -> tuple[float, float]:
        """Measure what no kernel exceeds: GB/s of a copy on the device, and TFLOP/s of one large product."""
        buffer = torch.empty(self.size(2**30, 2**16), dtype=torch.uint8, device=self.device)
        size = self.size(8192, 64)
        left, right = (torch.randn(size, size, device=self.device, dtype=self.dtype) for _ in range(2))
        cases: dict[str, Case] = {
            "copy": partial(torch.empty_like(buffer).copy_, buffer),
            "product": partial(torch.mm, left, right),
        }
        found = self.milliseconds(cases, CALLS)
        return 2 * buffer.numel() / found["copy"] / 1e6, 2 * size**3 / found["product"] / 1e9


def beside_first(found: Mapping[str, float], title: str) -> Rows:
    """Yield milliseconds of cases that took turns, with their ratio to the first one's."""
    first = next(iter(found.values()))
    for name, milliseconds in found.items():
        yield row(f"{title}: {name}", milliseconds, "ms", f"{milliseconds / first:.2f} x the first")


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"
