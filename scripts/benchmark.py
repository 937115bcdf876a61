"""Measure speed and memory: python scripts/benchmark.py prompt_length=8192 'batch_sizes=[1,8]' 'ratios=[1,4]'."""

from __future__ import annotations

from typing import Any

from hydra_command import command


@command("benchmark", on_devices=True)
def main(settings: Any) -> None:
    from dmc.commands.benchmark import benchmark

    print(benchmark(settings))


if __name__ == "__main__":
    main()
