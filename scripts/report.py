"""Turn folders of results into one page: python scripts/report.py 'folders=[outputs/compare,outputs/benchmark]'."""

from __future__ import annotations

from typing import Any

from hydra_command import command


@command("report")
def main(settings: Any) -> None:
    from dmc.commands.report import ReportConfig, report
    from dmc.config import build_config

    page = report(build_config(ReportConfig, settings))
    print(f"{page}, its plots and data in {page.parent}")


if __name__ == "__main__":
    main()
