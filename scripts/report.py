"""Turn folders of results into one page: python scripts/report.py folders=outputs/compare,outputs/benchmark."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, ListConfig

from dmc.config.command_line import script


@script("report")
def main(settings: DictConfig) -> None:
    if not isinstance(settings.folders, ListConfig):
        raise ValueError(f"folders={settings.folders!r}: expected one or several, folders=outputs/compare")
    from dmc.results.report import read_folders, write_page

    findings = read_folders([Path(str(folder)) for folder in settings.folders], settings.reference)
    page = write_page(findings, Path(settings.output), settings.title)
    print(f"{page}, its plots and data in {page.parent}")


if __name__ == "__main__":
    main()
