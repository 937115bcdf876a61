"""Provenance of a result: versions, git commit, command."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("dmc-retrofit", "torch", "transformers", "lightning", "datasets", "tokenizers", "numpy", "lm-eval")

SLURM_VARIABLES = (
    "CLUSTER_NAME", "JOB_ID", "JOB_NAME", "JOB_PARTITION", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "RESTART_COUNT",
    "JOB_NODELIST", "NNODES", "NTASKS", "GPUS_ON_NODE",
)  # fmt: skip


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on, where installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@functools.cache
def git_commit() -> str | None:
    """Return the commit of the sources with `+changes` where the tree differs; None outside a git checkout.

    Read once in a process, as its sources are.
    """
    folder = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=folder, capture_output=True, text=True, check=True, timeout=10,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changes else "")


def provenance() -> dict[str, Any]:
    """Return command, versions and commit of this process."""
    name = Path(sys.argv[0]).name
    program = [name] if name == "dmc" else [Path(sys.executable).name, sys.argv[0]]
    return {
        "command": shlex.join([*program, *sys.argv[1:]]),
        "versions": package_versions(),
        "git_commit": git_commit(),
        "machine": f"{platform.machine()} {platform.system()}",
    }


def slurm_job() -> dict[str, str]:
    """Return Slurm's description of this process's job, without tokens; empty outside a job."""
    names = [f"SLURM_{name}" for name in SLURM_VARIABLES]
    return {name: os.environ[name] for name in names if name in os.environ}


@functools.cache
def installed_packages() -> tuple[str, ...]:
    """Return every installed package as `name==version`, sorted."""
    read = [item.metadata for item in importlib.metadata.distributions()]  # once per package: it takes most of the time
    return tuple(sorted({f"{metadata['Name']}=={metadata['Version']}" for metadata in read if metadata["Name"]}))
