"""Turn folders of results into one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dmc.config import build_config
from dmc.config.settings import OutputFolder, checked_dataclass
from dmc.results.leaderboard import write_leaderboard
from dmc.results.report import names_of_page, read_folders, write_page


@checked_dataclass(frozen=True)
class ReportConfig:
    """A page of results."""

    folders: Annotated[list[str], Field(min_length=1)]
    """Folders with a `cells.jsonl`."""
    title: str
    reference: str | None = None
    """Stock model with whose full cache compressed models are compared; None: that of the comparison."""
    leaderboard: OutputFolder | None = None
    """Folder of results in the format of kvpress's leaderboard; None: none are written."""
    output: OutputFolder = "outputs/report"

    def __post_init__(self) -> None:
        if (Path(self.output) / "cells.jsonl").exists():
            raise ValueError(
                f"output={self.output} holds measurements, whose results.csv would be replaced: "
                f"choose another folder, such as {self.output}/report"
            )


def report(config: ReportConfig) -> Path:
    """Write the page, and the leaderboard's folders if requested, and return the path of the page."""
    folders = [Path(folder) for folder in config.folders]
    findings = read_folders(folders, config.reference)
    names_of_page(Path(config.output))  # refuses files of others before anything is written
    if config.leaderboard is not None:
        write_leaderboard(folders, Path(config.leaderboard))
    return write_page(findings, Path(config.output), config.title)


def main(settings: Any) -> None:
    """Write the page, and say where."""
    page = report(build_config(ReportConfig, settings))
    print(f"{page}, its plots and data in {page.parent}")
