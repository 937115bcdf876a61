"""Color what caches keep of a text, then ask about it: python scripts/demo.py (20 seconds, no network, no GPU)."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

from omegaconf import DictConfig

import dmc
from dmc.config.command_line import script

SHIPPED = Path(dmc.__file__).parent / "demo_models"


@script("demo")
def main(settings: DictConfig) -> None:
    import torch

    from dmc.commands.demo import legend, page, text_and_questions, witnesses
    from dmc.models.loading import load_tokenizer, load_with_tokenizer

    folders = {name: path or str(SHIPPED / name) for name, path in settings.models.items()}
    control, retrofit = (load_with_tokenizer(folders[name], "float32")[0] for name in ("control", "retrofit"))
    tokenizer = load_tokenizer(folders["retrofit"])
    if settings.save:
        for name, model in (("control", control), ("retrofit", retrofit)):
            model.to(torch.bfloat16).save_pretrained(Path(settings.save) / name)
            tokenizer.save_pretrained(Path(settings.save) / name)
        return
    text = Path(settings.text or textwrap.__file__).read_text()
    counts = {name: settings[name] for name in ("length", "keys", "questions", "seed")}
    samples = text_and_questions(text, tokenizer, **counts)
    colors = settings.colors
    if colors is None:
        colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    said = f"{len(samples[0].prompt)} tokens of code with {counts['keys']} facts such as `set KEY VALUE`"
    print(f"{said}. Every cache below has compressed them\nbefore it was asked anything.\n\n{legend(colors)}")
    for block in page(witnesses(control, retrofit, tokenizer, samples), samples, tokenizer, colors=colors):
        print(block, flush=True)


if __name__ == "__main__":
    main()
