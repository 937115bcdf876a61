"""Folders of results as one self-contained page: what their stores hold, and how sure it is."""

from dmc.results.report.page import names_of_page, read_folders, write_page

__all__ = ["names_of_page", "read_folders", "write_page"]
