"""Replay a batch that a run has skipped: python scripts/replay.py run=DIR file=DIR/nonfinite/step_0000010_rank0.pt."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra_command import command


@command("replay", on_devices=True)
def main(settings: Any) -> None:
    from dmc.training.replay import replay

    file = Path(settings["file"])
    found = replay(Path(settings["run"]), file, settings["trust_run"])
    file.with_suffix(".json").write_text(json.dumps(asdict(found), indent=1))
    print(f"{found}\n\n{file.with_suffix('.json')}")


if __name__ == "__main__":
    main()
