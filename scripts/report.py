"""Turn folders of results into one page: python scripts/report.py folders=outputs/compare,outputs/benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from dmc.command_line import script
from dmc.evaluation.report import read_folders, write_page


@script("report")
def main(settings: DictConfig) -> None:
    try:
        if OmegaConf.is_missing(settings, "folders") or not isinstance(settings.folders, ListConfig):
            raise ValueError("give folders=outputs/compare, one or several")
        findings = read_folders([Path(str(folder)) for folder in settings.folders])
        page = write_page(findings, Path(settings.output), settings.title)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{page}, its plots and data in {page.parent}")


if __name__ == "__main__":
    main()
