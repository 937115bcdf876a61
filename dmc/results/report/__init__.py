"""Folders of results as one self-contained page: what their stores hold, and how sure it is."""

from dmc.results.report.page import judge, read_folders, write_page, write_plots

__all__ = ["judge", "read_folders", "write_page", "write_plots"]
