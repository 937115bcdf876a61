"""Two tiers of tests: the quick one runs before each commit; what it leaves out is marked with one of `FULL_TIER`.

`--quick` runs the quick tier, `--rest=I/N` the I-th of N parts of what it leaves out, without either everything runs,
so that a test that is named runs. `TEST_DURATIONS=FILE` appends a line for each test that ends: seconds and name.
"""

from __future__ import annotations

import collections
import itertools
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

FULL_TIER = {
    "slurm": "real Slurm daemons",
    "vllm": "vLLM in an environment of its own",
    "ray": "replicas on Ray Serve",
    "slow": "takes long, or varies what a quick test shows",
}
"""The marks of the tests that `--quick` leaves out; a test counts for the first that it has."""

_left_out: collections.Counter[tuple[str, str]] = collections.Counter()


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="leave out the tests of the full tier")
    parser.addoption("--rest", metavar="I/N", type=_part, help="run a part of what --quick leaves out: 0/6, ... 5/6")


def _part(text):
    index, _, count = text.partition("/")
    try:
        part = int(index), int(count)
    except ValueError:
        raise pytest.UsageError(f"--rest={text}: expected I/N, such as 0/6") from None
    if not 0 <= part[0] < part[1]:
        raise pytest.UsageError(f"--rest={text}: expected I from 0 to N - 1")
    return part


def kind_of(item):
    """Return the mark that leaves a test to the full tier, None for one of the quick tier."""
    return next((mark for mark in FULL_TIER if item.get_closest_marker(mark)), None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Choose the tier, then deal long tests to all processes: `--dist=worksteal` gives each a contiguous part."""
    part = config.getoption("rest")
    if config.getoption("quick"):
        _keep(config, items, lambda item: kind_of(item) is None)
    elif part is not None:
        index, count = part
        _keep(
            config, items, lambda item: kind_of(item) is not None and zlib.crc32(_unit(item).encode()) % count == index
        )
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    order = [*FULL_TIER, None]
    units: dict[str, list[Any]] = {}
    for item in sorted(items, key=lambda item: order.index(kind_of(item))):
        units.setdefault(_unit(item) if kind_of(item) else "quick", []).append(item)
    quick = units.pop("quick", [])
    share = -(-len(quick) // processes)
    items[:] = [
        item
        for process in range(processes)
        for item in itertools.chain(*[*units.values()][process::processes], quick[process * share :][:share])
    ]


def _unit(item):
    """Return what goes to one process: tests that share a cluster or an environment stay together, slow ones do not."""
    return item.nodeid if kind_of(item) == "slow" else item.nodeid.partition("::")[0]


def _keep(config, items, is_kept):
    left_out = [item for item in items if not is_kept(item)]
    for item in left_out:
        folder = item.path.relative_to(config.rootpath / "tests").parts[0]
        _left_out[kind_of(item) or "quick", folder if "." not in folder else "tests"] += 1
    items[:] = [item for item in items if is_kept(item)]
    config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish(session):
    """Tell the process that writes the summary what was left out: with xdist, the others collect the tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = [(*key, count) for key, count in _left_out.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take over what a process left out: all of them the same."""
    for mark, folder, count in getattr(node, "workeroutput", {}).get("left_out", []):
        _left_out[mark, folder] = count


def pytest_runtest_logreport(report):
    if "TEST_DURATIONS" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ["TEST_DURATIONS"]).open("a") as file:
            file.write(f"{report.duration:.3f} {report.when} {report.outcome} {report.nodeid}\n")


def pytest_terminal_summary(terminalreporter, config):
    """Say what the quick tier has left to the full one, by kind."""
    if config.getoption("quick") and _left_out:
        terminalreporter.section(f"{sum(_left_out.values())} tests left to ./scripts/test.sh --full")
        for mark, what in FULL_TIER.items():
            folders = [(count, folder) for (kind, folder), count in _left_out.items() if kind == mark]
            if folders:
                listed = ", ".join(f"{folder} {count}" for count, folder in sorted(folders, reverse=True))
                terminalreporter.write_line(f"{sum(count for count, _ in folders):5} {mark}: {what} ({listed})")
