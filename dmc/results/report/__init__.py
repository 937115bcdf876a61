"""Folders of results as one self-contained page: `reading.py` puts them into tables, `page.py` shows what they hold."""

from dmc.results.report.page import judge, write_page
from dmc.results.report.reading import read_folders

__all__ = ["judge", "read_folders", "write_page"]
