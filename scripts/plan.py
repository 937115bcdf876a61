"""Tell how many requests a GPU holds: python scripts/plan.py model=meta-llama/Llama-2-7b-hf gpu=80 context=4096."""

from __future__ import annotations

from typing import Any

from hydra_command import command


@command("plan")
def main(settings: Any) -> None:
    from dmc.commands.plan import CapacityConfig, print_capacity
    from dmc.config import build_config

    print_capacity(build_config(CapacityConfig, settings))


if __name__ == "__main__":
    main()
