"""Claims: files that record which live process works on something, on disks that machines share.

A claim is a file `NAME.1` with who holds it, touched every few seconds. It is void once its process is gone (known at
once on the same machine, and of an earlier start of the same Slurm job), or no touch has come for `EXPIRY` seconds, by
the clock of the file system. A void claim is taken over by creating the next number, which only one process can; no
lock of the file system is needed, for on NFS not all are to be trusted.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

BEAT = 10.0
"""Seconds between two touches."""
EXPIRY = 120.0
"""Seconds without a touch after which a claim is void."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """A process that holds a claim."""

    host: str
    pid: int
    since: str
    """When it took the claim."""
    space: str
    """Namespace of its process number: this boot of the machine, and its container."""
    started: str
    """Start time, which distinguishes the process from a later one with its number."""
    slurm_job: str | None = None
    slurm_restarts: int = 0

    def __str__(self) -> str:
        job = "" if self.slurm_job is None else f", Slurm job {self.slurm_job}"
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended; False does not mean that it lives."""
        me = _myself()
        if self.slurm_job is not None and self.slurm_job == me.slurm_job and self.slurm_restarts < me.slurm_restarts:
            return True  # Slurm starts a job again when all of it has ended
        return self.space == me.space and self.started != _started(self.pid)


class ClaimedError(OSError):
    """Another process holds the claim.

    Args:
        message: for the user.
        holder: the holder; None: it has written no name yet.
    """

    def __init__(self, message: str, holder: Holder | None) -> None:
        super().__init__(message)
        self.holder = holder


@contextmanager
def claim(path: Path, wait: bool = False) -> Iterator[threading.Event]:
    """Hold the claim `path`, a name in an existing folder, and release it at the end.

    Args:
        path: the claim; its files are `path` with a dot and a number.
        wait: watch a holder that may be gone until it shows life or its claim is void, for at most `EXPIRY` seconds.
    Yields:
        Set when the claim is lost: this process could not touch it for long, and another one has taken it over.
    Raises:
        ClaimedError: another process holds it.
        OSError: it cannot be written.
    """
    seen: dict[Path, int] = {}
    while True:
        try:
            own = _take(path)
            break
        except ClaimedError as error:
            beats = _beats(path)
            known = seen or beats
            showed_life = any(beat != known.get(file) for file, beat in beats.items())
            lives = error.holder is not None and error.holder.space == _myself().space
            if not wait or lives or showed_life:
                raise
            if not seen:
                logger.warning("%s: looking for %g s at most whether it still runs", error, EXPIRY)
            seen = known
            time.sleep(BEAT / 10)
    over, lost, identity = threading.Event(), threading.Event(), own.stat().st_ino
    beating = threading.Thread(target=_beat, args=(own, identity, over, lost), name=f"claim {path.name}", daemon=True)
    beating.start()
    try:
        yield lost
    finally:
        over.set()
        beating.join()
        with suppress(FileNotFoundError):
            if own.stat().st_ino == identity:  # else a later start has given its claim the same number
                own.unlink()


def _take(path: Path) -> Path:
    """Create the claim's next file and remove those that are void.

    Raises:
        ClaimedError: a file is not void.
    """
    last = _refuse_held(path, _files(path))
    own = path.with_name(f"{path.name}.{last + 1}")
    try:
        handle = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:  # another process was faster
        raise _claimed(path, _read(own)) from None
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(_myself()), file)
        others = {number: file for number, file in _files(path).items() if file != own}
        _refuse_held(path, others)  # claims since the first look
    except BaseException:
        own.unlink(missing_ok=True)
        raise
    for void in others.values():
        void.unlink(missing_ok=True)
    return own


def _refuse_held(path: Path, files: dict[int, Path]) -> int:
    """Return the highest number among void files, 0 for none.

    Raises:
        ClaimedError: a file is not void.
    """
    for file in files.values():
        holder = _read(file)
        if (holder is None or not holder.is_gone) and _age(file) < EXPIRY:
            raise _claimed(path, holder)
    return max(files, default=0)


def _claimed(path: Path, holder: Holder | None) -> ClaimedError:
    return ClaimedError(f"{path} is held by {holder or 'a process that has just taken it'}", holder)


def _files(path: Path) -> dict[int, Path]:
    """List the claim's files by number."""
    start = f"{path.name}."
    names = [name for name in os.listdir(path.parent) if name.startswith(start) and name[len(start) :].isdigit()]
    return {int(name[len(start) :]): path.with_name(name) for name in names}


def _read(file: Path) -> Holder | None:
    """Read who holds a file; None: it is empty yet, gone, or damaged."""
    try:
        return Holder(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _age(file: Path) -> float:
    """Return the seconds since a file was touched, by the file system's clock; infinite where it is gone."""
    clock = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        clock.touch()
        return clock.stat().st_mtime - _touched(file) / 1e9
    except FileNotFoundError:
        return float("inf")
    finally:
        clock.unlink(missing_ok=True)


def _touched(file: Path) -> int:
    """Return when a file was touched, in nanoseconds; opened for it, since NFS answers a mere `stat` from memory."""
    with file.open() as opened:
        return os.fstat(opened.fileno()).st_mtime_ns


def _beats(path: Path) -> dict[Path, int]:
    found = {}
    for file in _files(path).values():
        try:
            found[file] = _touched(file)
        except FileNotFoundError:
            continue
    return found


def _beat(own: Path, identity: int, over: threading.Event, lost: threading.Event) -> None:
    """Touch a claim until it is released or lost."""
    while not over.wait(BEAT):
        try:
            if own.stat().st_ino != identity:
                raise FileNotFoundError
            os.utime(own)
        except FileNotFoundError:
            logger.warning("%s is gone: this process was taken for dead, another one may do the same work", own)
            lost.set()
            return
        except OSError as error:  # a server that comes back
            logger.warning("%s could not be touched: %s", own, error)


def _myself() -> Holder:
    job = os.environ.get("SLURM_JOB_ID")
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        since=datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        space=_space(),
        started=_started(os.getpid()),
        slurm_job=job,
        slurm_restarts=int(os.environ.get("SLURM_RESTART_COUNT") or 0) if job else 0,
    )


def _space() -> str:
    """Name the namespace of process numbers: a container may share its host's name but not its numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str:
    """Return when a process of this machine started, in ticks since boot; empty: there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self").exists():
            return ""
    else:
        return "" if state in "ZX" else fields[18]
    try:  # no /proc
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "running"
