"""Export the last checkpoint of a run: python scripts/export.py run=outputs/llama2_7b_cr4 output=exported/cr4."""

from __future__ import annotations

from typing import Any

from hydra_command import command


@command("export", on_devices=True)
def main(settings: Any) -> None:
    from dmc.commands.export import ExportConfig, export
    from dmc.config import build_config

    print(f"exported {export(build_config(ExportConfig, settings))}")


if __name__ == "__main__":
    main()
