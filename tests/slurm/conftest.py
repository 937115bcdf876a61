"""A real Slurm on this machine: munged, slurmctld and five slurmd nodes in one temporary folder."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
NODES = ("node1", "node2", "node3", "node4", "node5")
SETTINGS = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
FirstJobId={first_job}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
JobRequeue=1
MinJobAge=7200
SchedulerParameters=sched_interval=1
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Slurm:
    """A running cluster; every call has a time limit."""

    folder: Path
    environment: dict[str, str]
    jobs: list[str] = field(default_factory=list)

    def call(self, *command, seconds=30):
        """Run a Slurm client and return what it prints."""
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments):
        """Submit from the project's root as a user does and return the job's number."""
        self.jobs.append(self.call("sbatch", "--parsable", *arguments))
        return self.jobs[-1]

    def state(self, job):
        """Return the states of a job's tasks, such as RUNNING; empty once it is gone from the queue."""
        return self.call("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")

    def signal(self, job, name):
        """Send a signal to the processes that srun started for a job."""
        self.call("scancel", f"--signal={name}", job)

    def wait_until(self, condition, what, seconds=300):
        """Poll until something holds.

        Raises:
            TimeoutError: it does not hold in time; the cluster's state is in the message.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds} s\n{self.call('scontrol', 'show', 'job')}")
            time.sleep(0.2)

    def wait(self, job, seconds=300):
        """Wait until every task of a job has ended, requeues included, and return the state."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
        self.wait_until(lambda: set(self.state(job).split()) <= ended, f"end of job {job}", seconds)
        return self.state(job)


@pytest.fixture(scope="session")
def slurm():
    """Start the cluster once for all tests and take it down by its pid files.

    Jobs' numbers, from which their rendezvous follows, are other ones than those of another process's cluster.
    """
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs Slurm's daemons; not installed: {', '.join(missing)}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # pytest's own folders are too long for a socket's path
    try:
        cluster = _start(folder)
        yield cluster
        if cluster.jobs:
            cluster.call("scancel", *cluster.jobs)
            cluster.wait_until(lambda: not cluster.call("squeue", "--noheader"), "an empty queue", 30)
    finally:
        _stop(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder):
    ports = _free_ports(1 + len(NODES))
    host = socket.gethostname().split(".")[0]
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(
        SETTINGS.format(
            host=host,
            ports=ports,
            first_job=40000 + ports[0] % 9000,  # whose MASTER_PORT lies where Ray's workers like to be
            folder=folder,
            user=getpass.getuser(),
            nodes="\n".join(nodes),
        )
    )
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    paths = os.pathsep.join([str(Path(sys.executable).parent), "/usr/sbin", "/usr/bin", os.environ["PATH"]])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": paths, "OMP_NUM_THREADS": "1"}
    environment["RAY_worker_niceness"] = "0"  # 15 by default: beside other tests replicas would hardly run
    cluster = Slurm(folder, environment)
    munge = [f"--{name}-file={folder}/munge.{suffix}" for name, suffix in (("key", "key"), ("pid", "pid"))]
    munge += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed", f"--socket={folder}/munge.socket"]
    cluster.call("munged", "--force", *munge)
    cluster.call("slurmctld", "-c")
    for name in NODES:
        cluster.call("slurmd", "-N", name)
    all_idle = f"{len(NODES)} idle"
    cluster.wait_until(lambda: cluster.call("sinfo", "--noheader", "--format=%D %T") == all_idle, "idle nodes", 30)
    return cluster


def _free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


def _stop(folder):
    """End the daemons: nodes, controller, munge."""
    for names in ([f"slurmd-{node}.pid" for node in NODES], ["slurmctld.pid"], ["munge.pid"]):
        processes = []
        for name in names:
            with contextlib.suppress(OSError, ValueError):
                processes.append(int((folder / name).read_text()))
                os.kill(processes[-1], signal.SIGTERM)
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{process}").exists() for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
