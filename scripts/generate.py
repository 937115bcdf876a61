"""Continue a prompt from the compressed cache: python scripts/generate.py model=DIR prompt='import os'.

Read a text once: context=notes.txt save=outputs/caches/notes, and from then on context=outputs/caches/notes.
A stock model with a training-free policy of configs/policy: policy=h2o budget=4.
A model too large for one device: torchrun --nproc-per-node 2 scripts/generate.py model=DIR prompt='import os'.
"""

from __future__ import annotations

from typing import Any

from hydra_command import command


@command("generate", on_devices=True)
def main(settings: Any) -> None:
    from dmc.commands.generate import GenerateConfig, generate
    from dmc.config import build_config

    generate(build_config(GenerateConfig, settings))


if __name__ == "__main__":
    main()
