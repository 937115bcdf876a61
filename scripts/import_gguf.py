"""Write a GGUF file as a Hugging Face folder: python scripts/import_gguf.py file=FILE.gguf output=DIR."""

from __future__ import annotations

from typing import Any

from hydra_command import command


@command("import_gguf")
def main(settings: Any) -> None:
    from dmc.commands.gguf import ImportConfig
    from dmc.config import build_config

    print(build_config(ImportConfig, settings).run())


if __name__ == "__main__":
    main()
