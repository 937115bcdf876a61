"""Folders of results as one self-contained page: what their stores hold, and how sure it is."""

from dmc.results.report.page import read_folders, write_page

__all__ = ["read_folders", "write_page"]
