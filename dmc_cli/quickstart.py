"""The main job: dmc quickstart [base=tiny | model=DIR] [settings of the retrofit, e.g. seed=1].

It brings SmolLM2-135M by the package index, learns gates to CR 4, and compares its cache with others. base=tiny trains
a tiny model from scratch instead, which it also does where no index has the other one. Settings after --base go to the
tiny model's pretraining, those after --retrofit (the default) to the retrofit, those after --compare to the comparison
with the pretrained model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from dmc_cli.hydra_command import CONFIGS, exit_in_one_line

TINY = ("base", "control", "retrofit")
SMOLLM2 = "outputs/models/smollm2-135m"
BFLOAT16 = [
    "trainer.precision=bf16-mixed",
    "training.export_dtype=bfloat16",
    "training.stages.solidify.length=40 steps",  # in the time of 18 in float32
]


def main(arguments: Sequence[str]) -> None:
    """Run the main job with the settings after each of its flags."""
    settings: dict[str, list[str]] = {"--base": [], "--retrofit": [], "--compare": []}
    chosen, base = "--retrofit", "smollm2"
    for argument in arguments:
        if argument in ("-h", "--help"):
            return print(__doc__)
        if argument in settings:
            chosen = argument
        elif argument.startswith("base="):
            base = argument.removeprefix("base=")
        else:
            settings[chosen].append(argument)
    try:
        if base not in ("smollm2", "tiny"):
            raise ValueError(f"base={base}: expected smollm2 or tiny; a model of your own is model=DIR")
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            run(base == "tiny", *settings.values())
    except Exception as error:
        exit_in_one_line(error)


def run(is_tiny: bool, pretraining: list[str], retrofit: list[str], comparison: list[str]) -> None:
    """Compose the settings of every part, and run them."""
    experiment = "quickstart_tiny_retrofit" if is_tiny else "quickstart"
    compose("train", overrides=[f"experiment={experiment}", *retrofit])  # wrong settings end before seconds of imports
    compose("compare", overrides=["experiment=quickstart_compare", *comparison])
    from dmc.config.command_line import plain_values, prepare_process
    from dmc.config.processor import multiplies_bfloat16
    from dmc.training.config import RunConfig, run_config

    def values(command: str, *overrides: str) -> Any:
        return plain_values(compose(command, overrides=[*overrides]))

    def from_scratch() -> list[RunConfig]:
        settings = (pretraining, retrofit, retrofit)
        named = zip(TINY, settings, strict=True)
        return [run_config(values("train", f"experiment=quickstart_tiny_{name}", *given)) for name, given in named]

    fast = BFLOAT16 if multiplies_bfloat16() else []
    tiny = from_scratch() if is_tiny else []
    gates = run_config(values("train", "experiment=quickstart", *fast, *retrofit)) if not tiny else None
    grid = values("compare", "experiment=quickstart_compare", *comparison)
    from dmc.commands import quickstart, quickstart_tiny  # seconds, which wrong settings do not wait for
    from dmc.training.callbacks.preemption import EXIT_PREEMPTED, PreemptedError

    prepare_process()
    bringing = values("import_gguf", "package=smollm2_135m", f"output={SMOLLM2}")
    if gates is not None and gates.model == SMOLLM2 and not quickstart.bring_model(bringing):
        tiny = from_scratch()
    if gates is None or tiny:
        job = quickstart_tiny.from_scratch(tiny, Path("outputs/quickstart_tiny"))
    else:
        job = quickstart.of_pretrained(gates, grid)
    try:
        quickstart.run_quickstart(job, CONFIGS)
    except PreemptedError as stop:
        print(stop)
        sys.exit(EXIT_PREEMPTED)
