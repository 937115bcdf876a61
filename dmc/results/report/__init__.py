"""Folders of results as one self-contained page: what their stores hold, and how sure it is."""

from dmc.results.report.page import headline_of, read_folders, write_page, write_plots

__all__ = ["headline_of", "read_folders", "write_page", "write_plots"]
