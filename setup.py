"""Puts the folders `configs` and `scripts` into a wheel as packages of `dmc`; all else stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["dmc*"]), "dmc.configs", "dmc.scripts"])
