"""Export the last checkpoint of a run as a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import StrictBool

from dmc.config import build_config
from dmc.config.settings import Count, OutputFolder, Ratio, checked_dataclass
from dmc.training.export import export_checkpoint

MEASURED = {
    "calibrate": "calibrate",
    "calibration_sequences": "calibration_sequences",
    "validation_sequences": "validation_sequences",
    "dtype": "export_dtype",
}
"""Settings here that replace settings of the run's training, and their names there."""


@checked_dataclass(frozen=True)
class ExportConfig:
    """An export; None: as the run says."""

    run: str
    """Output folder of a training run."""
    output: OutputFolder
    target_ratio: Ratio | None = None
    calibrate: StrictBool | None = None
    calibration_sequences: Count | None = None
    validation_sequences: Count | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    use_previous_checkpoint: StrictBool = False
    device: str | None = None
    push_to_hub: str | None = None
    trust_run: StrictBool = False
    overwrite: StrictBool = False
    merge: StrictBool = False
    """Write the base's weights too where gates alone were learned: by itself that writes an adapter of gates."""


def export(config: ExportConfig) -> Path:
    """Export a run's last checkpoint and return the folder."""
    changes = {there: getattr(config, here) for here, there in MEASURED.items()}
    return export_checkpoint(
        Path(config.run),
        Path(config.output),
        target_ratio=config.target_ratio,
        overwrite=config.overwrite,
        overrides={name: value for name, value in changes.items() if value is not None},
        use_previous_checkpoint=config.use_previous_checkpoint,
        trust_run=config.trust_run,
        device=config.device,
        push_to_hub=config.push_to_hub,
        merge=config.merge,
    )


def main(settings: Any) -> None:
    """Export, and say where."""
    print(f"exported {export(build_config(ExportConfig, settings))}")
