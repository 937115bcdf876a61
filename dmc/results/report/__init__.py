"""Folders of results as one self-contained page: read, judge, draw, write."""

from dmc.results.report.page import write_page
from dmc.results.report.reading import read_folders

__all__ = ["read_folders", "write_page"]
