"""Plant the faults of `planted_faults.py` one after another, and see which tests fail: no part of either tier.

    python tests/plant_faults.py --out faults.csv              all forty against the quick tier
    python tests/plant_faults.py --out faults.csv --full       and what that misses against the rest
    python tests/plant_faults.py --only stop_cut_short         one fault
    python tests/plant_faults.py --check                       only whether all faults apply

It works in copies of the checkout, which is left alone. Tests of the fault's own folders run first, then the others. A
test that fails, crashes or hangs counts only if it passes without the fault. Results are written as they come; what
the file holds already is not run again, unless the fault has changed or is named.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib.util
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planted_faults import FAULTS, FLOORS, Fault, check_cpp, check_faults

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("quick folder", "quick rest", "full")
"""What runs until a fault is caught, in this order."""
MISSED = "NOT CAUGHT"
NEIGHBORS = {
    "compression": ("models", "kernels", "training", "runtime"),
    "models": ("training", "runtime", "kernels", "serving"),
    "kernels": ("runtime", "policies", "models"),
    "policies": ("runtime", "results", "kernels"),
    "runtime": ("policies", "serving", "results", "commands"),
    "data": ("training", "results"),
    "training": ("data", "models", "commands"),
    "results": ("commands", "policies"),
    "serving": ("runtime", "results"),
    "commands": ("training", "results", "serving", "data"),
}
"""Folders of tests that are most likely to notice a fault of a floor, after its own."""
EVENTS = "PLANT_FAULTS_EVENTS"
"""Variable with the file into which pytest, which loads this module as a plugin, writes what it does."""
PATIENCE_OF_FULL = 6
"""How many times longer a test of the full tier may take than one of the quick tier."""
NO_TESTS = 5
"""Exit code of pytest."""


def _write_event(kind: str, nodeid: str) -> None:
    if path := os.environ.get(EVENTS):
        with Path(path).open("a") as file:
            file.write(json.dumps([kind, nodeid]) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write_event("started", nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        _write_event("failed", report.nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _write_event("ended", nodeid)


def pytest_collectreport(report: Any) -> None:
    _write_event("failed" if report.failed else "collected", report.nodeid)


@dataclass(frozen=True)
class Row:
    """What is known of a fault: a line of the file of results."""

    floor: str
    fault: str
    caught_by: str
    """Id of a test, with `crash` or `timeout` before it if it did not fail."""
    tier: str
    """One of `STAGES`, or `MISSED`."""
    seconds: float
    ran: str
    """The last stage that ran."""
    change: str
    """Digest of the fault."""

    def covers(self, fault: Fault, num_stages: int) -> bool:
        """Whether nothing is left to run for the fault in so many stages."""
        return self.change == fault.digest and (self.tier != MISSED or STAGES.index(self.ran) >= num_stages - 1)


@dataclass
class Children:
    """Processes of pytest, which end with this one."""

    running: set[int] = field(default_factory=set)
    stopped: bool = False

    def kill(self, process_group: int) -> None:
        """Kill a run and what it has started."""
        try:
            os.killpg(process_group, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def stop(self) -> None:
        """Kill all, and let no other start."""
        self.stopped = True
        for process_group in [*self.running]:
            self.kill(process_group)


@dataclass
class Copy:
    """A copy of the checkout, in which one fault at a time is planted."""

    folder: Path
    patience: float
    children: Children
    broken: list[str]
    """Ids that fail without any fault too: left out, in all copies."""

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Plant a fault until the block ends."""
        original = (self.folder / fault.file).read_text()
        self._write(fault.file, fault.planted(original))
        try:
            yield
        finally:
            self._write(fault.file, original)

    def _write(self, name: str, source: str) -> None:
        path = self.folder / name
        path.write_text(source)
        if path.suffix == ".py":  # bytecode is told from stale by seconds and size alone
            Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def run_pytest(self, arguments: Sequence[str], fault: Fault | None = None, patience: float | None = None) -> str:
        """Run tests until one fails.

        Args:
            arguments: of pytest.
            fault: the fault that is planted; None: none.
            patience: seconds in which some test has to end; None: as in the quick tier.
        Returns:
            Id of a test that failed, with `crash` or `timeout` before it if it did not end; empty: none.
        Raises:
            RuntimeError: pytest could not run.
        """
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as scratch:
            events, output = Path(scratch, "events"), Path(scratch, "output")
            events.touch()
            code = self._wait(arguments, fault, events, output, self.patience if patience is None else patience)
            found = [json.loads(line) for line in events.read_text().splitlines()]
            text = output.read_text(errors="replace")
        if failed := [nodeid for kind, nodeid in found if kind == "failed"]:
            return str(failed[0])
        if code in (0, NO_TESTS):
            return ""
        ended = {nodeid for kind, nodeid in found if kind == "ended"}
        last = next((nodeid for kind, nodeid in reversed(found) if kind == "started" and nodeid not in ended), None)
        if last is None or self.children.stopped:
            raise RuntimeError(f"pytest {' '.join(arguments)} ended with {code}: {text.strip()[-500:]}")
        return f"{'crash' if code is not None else 'timeout'} {last}"

    def _wait(
        self, arguments: Sequence[str], fault: Fault | None, events: Path, output: Path, patience: float
    ) -> int | None:
        """Return the exit code of pytest; None: no test had ended for too long."""
        if self.children.stopped:
            raise RuntimeError("stopped")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
            **{"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1", EVENTS: str(events)},
        }
        if fault is not None and fault.file.endswith(".cpp"):  # kernels with a fault stay out of the user's cache
            environment["XDG_CACHE_HOME"] = str(events.with_name("cache"))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "plant_faults"]
        with output.open("w") as file:
            process = subprocess.Popen(
                [*command, *arguments],
                cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        self.children.running.add(process.pid)
        try:
            while True:
                try:
                    return process.wait(timeout=1)
                except subprocess.TimeoutExpired:
                    if time.time() - events.stat().st_mtime > patience:
                        return None
        finally:
            self.children.kill(process.pid)
            process.wait()
            self.children.running.discard(process.pid)

    def passes_without(self, nodeid: str) -> bool:
        """Whether a test, or the collection of a file, passes without a fault."""
        only = [] if "::" in nodeid else ["--collect-only"]
        return not self.run_pytest([*only, nodeid], patience=PATIENCE_OF_FULL * self.patience)

    def catch(self, fault: Fault, stage: str) -> tuple[str, float]:
        """Run the tests of a stage with a fault; return what caught it, if anything, and the seconds of these runs."""
        seconds = 0.0
        while True:
            started, left_out = time.monotonic(), [*self.broken]
            with self.planted(fault):
                patience = self.patience * (PATIENCE_OF_FULL if stage == "full" else 1)
                arguments = [*self._tests(fault, stage), *_left_out(left_out)]
                caught_by = self.run_pytest(arguments, fault, patience)
            seconds += time.monotonic() - started
            nodeid = caught_by.removeprefix("crash ").removeprefix("timeout ")
            if not caught_by or self.passes_without(nodeid):
                return caught_by, seconds
            if nodeid in left_out:
                raise RuntimeError(f"{nodeid} fails without a fault, and could not be left out")
            if nodeid not in self.broken:  # by another thread
                self.broken.append(nodeid)
                print(f"{nodeid} fails without a fault: it is left out\n", end="", flush=True)

    def _tests(self, fault: Fault, stage: str) -> list[str]:
        """Return the arguments of pytest for a stage."""
        tests = self.folder / "tests"
        own = [f"tests/{name}" for name in FLOORS[fault.floor]]
        near = [f"tests/{name}" for floor in NEIGHBORS[fault.floor] for name in FLOORS[floor]]
        far = sorted({f"tests/{path.relative_to(tests).parts[0]}" for path in tests.rglob("test_*.py")})
        every = [name for name in dict.fromkeys([*own, *near, *far]) if (self.folder / name).exists()]
        if stage == "full":
            return ["--rest=0/1", *every]
        return ["--quick", *(name for name in every if (name in own) == (stage == "quick folder"))]


def _left_out(broken: Sequence[str]) -> list[str]:
    """Return the options of pytest that leave out tests, and the one that every fault fails."""
    ids = ["--ignore=tests/test_planted_faults.py"]
    return ids + [f"--deselect={nodeid}" if "::" in nodeid else f"--ignore={nodeid}" for nodeid in broken]


def examine(copy: Copy, fault: Fault, stages: Sequence[str]) -> Row:
    """Run stages until one catches a fault."""
    seconds, caught_by, stage = 0.0, "", ""
    for stage in stages:
        caught_by, more = copy.catch(fault, stage)
        seconds += more
        if caught_by:
            break
    return Row(
        fault.floor, fault.name, caught_by, stage if caught_by else MISSED, round(seconds, 1), stage, fault.digest
    )


def copy_checkout(target: Path) -> Path:
    """Copy the tracked and new files of this checkout, as they are now."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def read_rows(path: Path) -> dict[str, Row]:
    """Read results by fault; of several of one fault the last counts."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        lines: list[dict[str, Any]] = [*csv.DictReader(file)]
    rows = [Row(**line | {"seconds": float(line["seconds"])}) for line in lines]
    return {row.fault: row for row in rows}


def append_row(path: Path, row: Row) -> None:
    """Append a result, so that an aborted run keeps it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [of.name for of in dataclasses.fields(Row)])
        if not file.tell():
            writer.writeheader()
        writer.writerow(dataclasses.asdict(row))


def table(rows: Sequence[Row]) -> str:
    """Write results as a table, and how many faults each tier catches."""
    lines = [("floor", "fault", "tier", "seconds", "caught by")]
    lines += [(row.floor, row.fault, row.tier, f"{row.seconds:.0f}", row.caught_by) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    quick = sum(row.tier in STAGES[:2] for row in rows)
    every = sum(row.tier in STAGES for row in rows)
    text += f"\n\nThe quick tier catches {quick} of {len(rows)}"
    if all(row.tier in STAGES or row.ran == STAGES[-1] for row in rows):
        text += f", the full one {every}"
    return f"{text}."


def plant(faults: Sequence[Fault], known: dict[str, Row], num_stages: int, options: argparse.Namespace) -> list[str]:
    """Examine faults in several processes; return what went wrong."""
    children, broken, problems = Children(), list[str](), list[str]()
    lock, copies = threading.Lock(), queue.SimpleQueue[Copy]()

    def work(fault: Fault) -> None:
        copy = copies.get()
        try:
            begin = 0
            if (old := known.get(fault.name)) is not None and old.change == fault.digest and not options.only:
                begin = STAGES.index(old.ran) + 1
            row = examine(copy, fault, STAGES[begin:num_stages])
        except Exception as error:
            with lock:
                problems.append(f"{fault.name}: {error}")
            return
        finally:
            copies.put(copy)
        with lock:
            known[fault.name] = row
            append_row(options.out, row)
            print(f"{row.floor} {row.fault}: {row.tier} {row.caught_by} ({row.seconds:.0f} s)", flush=True)

    with tempfile.TemporaryDirectory(prefix="faults_") as scratch:
        for number in range(min(options.processes, len(faults))):
            place = Path(scratch, str(number), "checkout")
            copies.put(Copy(copy_checkout(place), options.patience, children, broken))
        with ThreadPoolExecutor(options.processes) as pool:
            try:
                [*pool.map(work, faults)]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                children.stop()
                raise
    return problems


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults, whether examined before or not")
    parser.add_argument("--processes", type=int, default=2, help="faults at the same time, each on one core")
    parser.add_argument("--folder-only", action="store_true", help="run the quick tests of the fault's floor alone")
    parser.add_argument("--full", action="store_true", help="run the full tier where the quick one catches nothing")
    parser.add_argument("--out", type=Path, default=Path("outputs/planted_faults.csv"), help="results, one a line")
    parser.add_argument("--patience", type=float, default=300, help="seconds in which some quick test has to end")
    parser.add_argument("--check", action="store_true", help="only check that all faults apply")
    options = parser.parse_args()
    if options.processes < 1:
        parser.error(f"--processes={options.processes}: expected at least 1")
    if options.full and options.folder_only:
        parser.error("--full and --folder-only: expected one of them")
    if unknown := sorted({*(options.only or ())} - {fault.name for fault in FAULTS}):
        parser.error(f"--only {unknown[0]}: expected some of {', '.join(fault.name for fault in FAULTS)}")
    return options


def main() -> None:
    """Plant the faults that the command line asks for."""
    options = parse_options()
    try:
        check_faults(ROOT)
        check_cpp(ROOT)
        if options.check:
            print(f"all {len(FAULTS)} faults apply")
            return
        known = read_rows(options.out)
    except (ValueError, TypeError, KeyError) as error:
        sys.exit(f"error: {error}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # remove the copies then too
    num_stages = 1 if options.folder_only else 3 if options.full else 2
    asked = [fault for fault in FAULTS if options.only is None or fault.name in options.only]
    left = [
        fault
        for fault in asked
        if options.only or not (row := known.get(fault.name)) or not row.covers(fault, num_stages)
    ]
    try:
        problems = plant(left, known, num_stages, options) if left else []
    except KeyboardInterrupt:
        sys.exit(f"stopped: the same command goes on from what {options.out} holds")
    print(table([known[fault.name] for fault in asked if fault.name in known]))
    if problems:
        sys.exit("error: " + "; ".join(problems))


if __name__ == "__main__":
    main()
