"""Export the last checkpoint of a run: python scripts/export.py run=outputs/llama2_7b_cr4 output=exported/cr4."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from dmc.config.command_line import script

MEASURED = {
    "calibrate": "calibrate",
    "calibration_sequences": "calibration_sequences",
    "validation_sequences": "validation_sequences",
    "dtype": "export_dtype",
}
"""Settings here, and their names in a run."""


@script("export")
def main(settings: DictConfig) -> None:
    from dmc.training.exporter import export_checkpoint

    folder = export_checkpoint(
        Path(settings.run),
        Path(settings.output),
        target_ratio=settings.target_ratio,
        overwrite=settings.overwrite,
        measured={name: settings[own] for own, name in MEASURED.items() if settings[own] is not None},
        use_previous_checkpoint=settings.use_previous_checkpoint,
        trust_run=settings.trust_run,
        device=settings.device,
        push_to_hub=settings.push_to_hub,
    )
    print(f"exported {folder}")


if __name__ == "__main__":
    main()
