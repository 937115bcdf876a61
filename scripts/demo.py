"""Color what caches keep of a text, then ask about it: python scripts/demo.py (20 seconds, no network, no GPU)."""

from __future__ import annotations

from typing import Any

from hydra_command import command


@command("demo")
def main(settings: Any) -> None:
    from dmc.commands.demo import DemoConfig, demo
    from dmc.config import build_config

    demo(build_config(DemoConfig, settings))


if __name__ == "__main__":
    main()
