"""Write a Llama as a Megatron checkpoint: python scripts/export_megatron.py model=DIR output=DIR tensor_size=4."""

from __future__ import annotations

from typing import Any

from hydra_command import command


@command("export_megatron")
def main(settings: Any) -> None:
    from dmc.commands.megatron import ExportConfig
    from dmc.config import build_config

    print(f"exported {build_config(ExportConfig, settings).run()}")


if __name__ == "__main__":
    main()
