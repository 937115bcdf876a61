"""Put runs or a sweep into one table, and draw their curves: python scripts/collect.py folder=outputs/sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra_command import command


@command("collect")
def main(settings: Any) -> None:
    from dmc.commands.report import collect

    print(collect(Path(str(settings["folder"]))))


if __name__ == "__main__":
    main()
