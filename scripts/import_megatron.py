"""Write a Megatron checkpoint as a Hugging Face folder: python scripts/import_megatron.py checkpoint=DIR output=DIR."""

from __future__ import annotations

from typing import Any

from hydra_command import command


@command("import_megatron")
def main(settings: Any) -> None:
    from dmc.commands.megatron import ImportConfig
    from dmc.config import build_config

    print(f"imported {build_config(ImportConfig, settings).run()}")


if __name__ == "__main__":
    main()
