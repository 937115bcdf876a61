"""Run a batch that a run has skipped: python scripts/replay.py run=DIR file=DIR/nonfinite/step_0000010_rank0.pt."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from dmc.command_line import script


@script("replay")
def main(settings: DictConfig) -> None:
    from dmc.training.replay import replay

    try:
        print(replay(Path(settings.run), Path(settings.file)))
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
