"""What the job files of slurm/ do when ranks crash, are told to stop or are refused: bash, and stubs of Slurm."""

import datetime
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRUN = """\
case "$*" in
*slurm/setting.py*) case=setting ;;
*plan=json*) case=plan ;;
*slurm/smoke.py*) case=smoke ;;
*) case=step ;;
esac
. "$STUBS/$case.sh"
"""
SCONTROL = """\
case "$*" in
"show hostnames"*) for node in $NODES; do echo "$node"; sleep 0.01; done ;; # line by line: none may miss its reader
*"show node node1") echo "NodeName=node1 Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=node1 State=IDLE" ;;
requeue*) echo "$2" >>"$STUBS/requeued" ;;
esac
"""
SBATCH = """\
echo "$*" >>"$STUBS/submitted"
wc -l <"$STUBS/submitted"
"""
JOB = {
    "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "1", "MAX_RESTARTS": "1",
    "NODES": "node1\nnode2",
}  # fmt: skip


class Cluster:
    """A folder of stubs in front of PATH, in which `step.sh` says what the ranks of a step do.

    Args:
        folder: where everything lies: the stubs, what they were told, and the run.
    """

    def __init__(self, folder):
        self.folder, self.run = folder, folder / "run"
        (folder / "slurm").symlink_to(ROOT / "slurm")
        (folder / "bin").mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sbatch", SBATCH), ("squeue", 'echo "${END-N/A}"')):
            self.add_program(name, text)
        self.does(setting=f"echo {self.run}")

    def add_program(self, name, text):
        program = self.folder / "bin" / name
        program.write_text(f"#!/usr/bin/env bash\n{text}")
        program.chmod(0o755)

    def does(self, **scripts):
        """Say what srun does for `step`, `setting`, `plan` or `smoke`."""
        for name, text in scripts.items():
            (self.folder / f"{name}.sh").write_text(text)

    def start(self, *command, **variables):
        """Start a script of slurm/ in the background."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        environment |= JOB | {"STUBS": str(self.folder), "RUN": str(self.run)} | variables
        environment["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", *command], cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip

    def turns(self, *command, **variables):
        """Run a job again as long as it requeues itself, as Slurm does; return what each turn printed."""
        printed = []
        while len(printed) <= len(self.lines("requeued")):
            job = self.start(*command, SLURM_RESTART_COUNT=str(len(printed)), **variables)
            printed.append(job.communicate(timeout=20)[0])
            self.status = job.returncode
        return printed

    def lines(self, name):
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


SAID = "srun: error: node%s\n"


@pytest.mark.parametrize(
    ("said", "crashed"),
    [
        (["1: task 3: Killed", "2: tasks 4-7: Exited with exit code 1"], True),
        (["1: task 3: Segmentation fault (core dumped)"], True),
        (["1: task 3: Out Of Memory"], True),
        (["1: tasks 0-3: Aborted"], True),
        (["1: task 3: Exited with exit code 70", "1: task 0: Killed"], True),
        (["1: task 3: Exited with exit code 70", "1: tasks 0-2: Exited with exit code 1"], False),
        (["1: task 0: Exited with exit code 1", "1: task 1: Killed"], False),
        (["[1-2]: tasks 0-7: Exited with exit code 75"], False),
        (["[1-2]: tasks 0,2,4: Exited with exit code 127"], False),
        (["1: task 0: Terminated", "1: task 1: Killed"], False),
        ([], False),
    ],
)
def test_only_a_failure_of_the_machine_is_a_crash(said, crashed, tmp_path):
    (tmp_path / "said").write_text("srun: Job step aborted: waiting\n" + "".join(SAID % line for line in said))
    command = [f'. slurm/launch.sh; is_crash "{tmp_path}/said" && echo crash || echo none']
    done = subprocess.run(["bash", "-c", *command], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == ("crash\n" if crashed else "none\n")


DIES = """\
n=${SLURM_RESTART_COUNT:-0}
echo "torch.OutOfMemoryError at start $n" >"$RUN/ranks/17-1.log"
"""
KILLED = DIES + "echo 'srun: error: node2: task 1: Killed' >&2; exit 137\n"


def test_a_hang_of_this_start_alone_names_the_command_that_compares_the_ranks(cluster):
    traces = cluster.run / "logs" / "flight_recorder" / "nccl"
    starts = 'mkdir -p "$RUN/logs/flight_recorder/nccl"; sleep 0.02; echo "{}" >>"$RUN/starts.jsonl"; sleep 0.02\n'
    hangs = '[ "$n" -gt 0 ] || echo trace >"$RUN/logs/flight_recorder/nccl/rank_0"\n'
    cluster.does(step=DIES + starts + hangs + KILLED.removeprefix(DIES))
    first, second = cluster.turns("slurm/train.sbatch")
    assert f"to compare the last collectives of the ranks: torchfrtrace --allow-incomplete-ranks {traces}\n" in first
    assert "torchfrtrace" not in second


def test_a_run_whose_rank_is_killed_goes_on_and_progress_gives_new_restarts(cluster):
    progress = 'mkdir -p "$RUN/checkpoints/step_000000$((4 * n + 4))" "$RUN/checkpoints/step_0000099.partial"\n'
    ends = '[ "$n" -lt 2 ] || { mkdir "$RUN/final"; exit 0; }\n'
    cluster.does(step=DIES + ends + progress + KILLED.removeprefix(DIES))
    printed = cluster.turns("slurm/train.sbatch")
    assert len(printed) == 3 and cluster.status == 0 and cluster.lines("requeued") == ["17", "17"]
    crashes = cluster.lines("run/crashes.log")
    for turn, step in enumerate((4, 8)):
        checkpoint = cluster.run / "checkpoints" / f"step_{step:07d}"
        assert f"restart 1 of 1 from the last good checkpoint: {checkpoint}\n" in printed[turn]
        why = f"node2: task 1: Killed; last line of its log: torch.OutOfMemoryError at start {turn}"
        assert f" ended: {why}\n" in printed[turn] and crashes[turn].endswith(f"job 17 from {checkpoint}: {why}")
        assert f"job 17, restart {turn}, node[1-2], CPUs per node: 4(x2): {cluster.run}\n" in printed[turn]


def test_a_run_that_always_crashes_ends_after_the_bound(cluster):
    cluster.does(step=DIES + "echo 'srun: error: node2: task 1: Exited with exit code 70' >&2; exit 70\n")
    printed = cluster.turns("slurm/train.sbatch")
    bound = "not restarted: 1 restarts from the same place (MAX_RESTARTS)"
    assert len(printed) == 2 and cluster.status == 70
    assert printed[1].rstrip().endswith(f"{bound}; last good checkpoint: no checkpoint yet")


@pytest.mark.parametrize("case", ["refused", "has its model", "ended from outside"])
def test_what_another_start_would_not_mend_is_not_requeued(cluster, case):
    said = {"refused": "task 1: Exited with exit code 1", "ended from outside": "task 0: Terminated"}
    finished = 'mkdir "$RUN/final"\n' if case == "has its model" else ""
    cluster.does(step=f"{DIES}{finished}echo 'srun: error: node2: {said.get(case, 'task 1: Killed')}' >&2; exit 1\n")
    (printed,) = cluster.turns("slurm/train.sbatch")
    assert f" ended: node2: {said.get(case, 'task 1: Killed')}" in printed and cluster.status == 1
    assert not cluster.lines("run/crashes.log")


def test_ranks_meet_at_the_address_of_the_first_node_and_one_task_of_an_array_trains_its_ratio(cluster):
    cluster.does(step='echo "$MASTER_ADDR $MASTER_PORT $SRUN_CPUS_PER_TASK"; echo "$*"')
    array = {"SLURM_ARRAY_JOB_ID": "20", "SLURM_ARRAY_TASK_ID": "4", "SLURM_CPUS_PER_TASK": "3"}
    (printed,) = cluster.turns("slurm/sweep.sbatch", "seed=3", **array)
    assert f"10.1.2.3 {10000 + 17} 3\n" in printed
    settings = f"seed=3 compression.target_ratio=4 training.snapshot_ratios=[] output_dir={cluster.run}/cr4"
    assert f"{settings} trainer.num_nodes=2 trainer.devices=1\n" in printed


WAITS = "trap '%s' USR1\ntouch \"$STUBS/ready\"\nwhile :; do sleep 0.02; done\n"
REFUSED = 'echo "srun: error: node1: task 0: Exited with exit code 1" >&2; exit 1'
SOON = (datetime.datetime.now() + datetime.timedelta(seconds=20)).isoformat(timespec="seconds")


@pytest.mark.parametrize(
    ("on_signal", "end", "requeued"),
    [
        ("exit 75", "N/A", ["20_4"]), ("exit 0", "N/A", []), (REFUSED, "N/A", []), ("echo told", SOON, ["20_4"]),
    ],
    ids=["saves", "was about to end", "is refused", "does not stop in time"],
)  # fmt: skip
def test_a_signal_reaches_the_ranks_and_the_task_asks_for_another_turn_of_itself(cluster, on_signal, end, requeued):
    cluster.does(step=WAITS % on_signal)
    job = cluster.start("slurm/train.sbatch", SLURM_ARRAY_JOB_ID="20", SLURM_ARRAY_TASK_ID="4", END=end)
    try:
        wait_until(lambda: (cluster.folder / "ready").exists())
        job.send_signal(signal.SIGUSR1)
        if end == SOON:
            wait_until(lambda: cluster.lines("requeued"))
            assert job.poll() is None
        else:
            job.communicate(timeout=20)
    finally:
        os.killpg(job.pid, signal.SIGKILL) if job.poll() is None else None
        job.communicate()
    assert cluster.lines("requeued") == requeued


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_ramp_and_its_branches_are_submitted_with_one_command(cluster):
    cluster.add_program("python", f'echo "{cluster.run}"; echo "2 3"')
    printed = cluster.start("slurm/branches.sh", "--nodes=4", "experiment=ramp").communicate(timeout=20)[0]
    assert printed == f"1 {cluster.run}\n2 {cluster.run}/branches/cr2\n3 {cluster.run}/branches/cr3\n"
    ramp, *branches = cluster.lines("submitted")
    assert ramp == "--parsable --job-name=ramp --nodes=4 slurm/train.sbatch experiment=ramp"
    for ratio, branch in zip((2, 3), branches, strict=True):
        assert "--dependency=afterok:1 --kill-on-invalid-dep=yes --nodes=4 slurm/train.sbatch experiment=ramp" in branch
        assert f"compression.target_ratio={ratio} training.branch_from={cluster.run}/milestones/cr{ratio} " in branch
        assert branch.endswith(f"output_dir={cluster.run}/branches/cr{ratio}")


FAILS = "echo 'error: %s is wrong' >&2; exit 1"
STOPPED = "echo 'srun: error: node2: task 1: Exited with exit code 75' >&2; exit 75"


@pytest.mark.parametrize(
    ("scripts", "last"),
    [
        ({"setting": FAILS % "it"}, "smoke: failed: settings: error: it is wrong"),
        ({"plan": FAILS % "memory"}, "smoke: failed: plan: error: memory is wrong"),
        ({"step": KILLED}, "smoke: failed: first start, to be stopped: node2: task 1: Killed; last line of its log: "),
        ({"step": STOPPED}, "smoke: failed: second start, to go on: node2: task 1: Exited with exit code 75"),
        ({"step": f'mkdir "$RUN"/once 2>/dev/null || exit 0; {STOPPED}', "smoke": "echo smoke: ok"}, "smoke: ok"),
    ],
    ids=["settings", "plan", "first start", "second start", "goes well"],
)
def test_the_smoke_job_stops_and_resumes_and_ends_with_the_reason_where_it_fails(cluster, scripts, last):
    cluster.run.mkdir()
    scripts = {name: text.replace("$RUN/ranks", "${RUN}_smoke_17/ranks") for name, text in scripts.items()}
    cluster.does(**{"plan": "echo {}", "step": "exit 0", "smoke": "exit 1"} | scripts)
    printed = cluster.start("slurm/smoke.sbatch", "experiment=any").communicate(timeout=20)[0].splitlines()
    assert printed[-1].startswith(last), "\n".join(printed)


def test_a_server_that_is_told_to_end_ends_its_ranks_and_not_their_launcher(cluster):
    cluster.does(step='while [ "$1" != bash ]; do shift; done; exec "$@"')
    rank = 'trap "touch $STUBS/drained; exit 0" TERM; touch $STUBS/ready; while :; do sleep 0.02; done'
    cluster.add_program("python", f'echo "$*" >"$STUBS/command"\nbash -c \'{rank}\' &\nwait\nexit 0\n')
    job = cluster.start("slurm/serve.sbatch", "ranks=2", "model=here")
    try:
        wait_until(lambda: (cluster.folder / "ready").exists())
        job.send_signal(signal.SIGUSR1)
        printed = job.communicate(timeout=20)[0]
    finally:
        os.killpg(job.pid, signal.SIGKILL) if job.poll() is None else None
    assert job.returncode == 0 and (cluster.folder / "drained").exists(), printed
    (command,) = cluster.lines("command")
    assert "--nproc-per-node=2 --master-addr=10.1.2.3 --master-port=10017 scripts/serve.py model=here" in command


@pytest.mark.parametrize("path", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda path: path.name)
def test_a_job_file_opens_with_its_use_and_is_bash(path):
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and lines[1].startswith("# ")
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)
