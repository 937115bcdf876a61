"""Measure speed and memory: python scripts/benchmark.py prompt_length=8192 'batch_sizes=[1,8]' 'ratios=[1,4]'.

A server of OpenAI's API under load: python scripts/benchmark.py server=http://127.0.0.1:8000 'load.rates=[1,4,null]'.
"""

from __future__ import annotations

from typing import Any

from hydra_command import command


@command("benchmark", on_devices=True)
def main(settings: Any) -> None:
    from dmc.commands.benchmark import benchmark

    print(benchmark(settings))


if __name__ == "__main__":
    main()
