"""The job files of slurm/ and the submitit launcher on a real Slurm, a tiny model, five nodes.

What bash does with what Slurm says is shown in test_crash_handling.py.
"""

import contextlib
import csv
import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from hydra import compose, initialize_config_dir
from launching import logged_losses, logged_parts, train_ranks, write_corpus
from scripts_here import run_script

from dmc.config.command_line import plain_values
from dmc.data import train_tokenizer
from dmc.training.config import run_config

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Settings of a run that takes seconds."""
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    return [
        "debug=tiny", "trainer=cpu", "data=text_files", "training.snapshot_ratios=[]",
        "training.validate_every_steps=1000",
        f"data.train.text.name={folder}/train", f"data.validation.text.name={folder}/held_out",
        f"data.cache_folder={folder}/cache", f"data.tokenizer.folder={folder}/tokenizer",
        "data.tokenizer.train_vocab_size=300", "data.num_workers=1", "training.activation_checkpointing=false",
        "base.shape.hidden_size=32", "base.shape.intermediate_size=64", "base.shape.num_hidden_layers=2",
        "base.shape.num_attention_heads=4", "base.shape.num_key_value_heads=2", "base.shape.head_dim=8",
    ]  # fmt: skip


def long_run(steps):
    stages = f"{{zero_out: {{length: 6 steps}}, retrofit: {{length: {steps - 6} steps}}, solidify: {{length: null}}}}"
    return [f"training.stages={stages}", "training.checkpoint_every_steps=1000", "trainer.strategy=ddp"]


def starts(folder):
    return [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]


def logs(folder):
    return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(folder.rglob("*.log")))


CONTAINED = """\
activate_environment() { export PATH=%s:$PATH; }
"""
PYTHON = """\
#!/usr/bin/env bash
case "$*" in *setting.py*) echo %s; exit ;; esac
[ -z "${SLURM_RESTART_COUNT-}" ] || { echo finished; exit; }
trap '%s' USR1
echo training with $SLURM_CPUS_ON_NODE CPUs
while :; do sleep 0.2; done
"""
SAVES = "sleep 8; echo saved; exit 75"
LIMIT = ["--time=1", "--signal=B:SIGUSR1@59"]
TURNS = {
    "endless": (SAVES, "train", ["--time=0", "--exclusive"]),
    "saves": (SAVES, "train", LIMIT),
    "exports": ("echo told", "train", LIMIT),
    "array": (SAVES, "sweep", [*LIMIT, "--array=2,4", "--cpus-per-task=3"]),
}


@pytest.fixture(scope="module", autouse=True)
def requeued_jobs(slurm, tmp_path_factory):
    """Jobs that wait for their limit, a minute: submitted before all others, to nodes of their own."""
    root, jobs = tmp_path_factory.mktemp("requeued"), {}
    for name, (on_signal, file, options) in TURNS.items():
        project = root / name
        shutil.copytree(ROOT / "slurm", project / "slurm")
        with (project / "slurm" / "site.sh").open("a") as site:
            site.write(CONTAINED % (project / "bin"))
        (project / "bin").mkdir()
        (project / "bin" / "python").write_text(PYTHON % (project / "run", on_signal))
        (project / "bin" / "python").chmod(0o755)
        options = ["--exclude=node[1-2]", "--nodes=1", "--ntasks-per-node=1", *options, f"--chdir={project}"]
        ramp = slurm.submit(*options, f"--output={project}/job-%a.log", f"slurm/{file}.sbatch")
        wait = [f"--dependency=afterok:{ramp}", "--kill-on-invalid-dep=yes", f"--output={project}/branch.log"]
        jobs[ramp], jobs[slurm.submit(*wait, "--wrap=echo branch")] = name, f"branch of {name}"
    slurm.wait_until(lambda: "training" in logs(root / "endless" / "run"), "a first turn")
    slurm.call("scancel", "--batch", "--signal=USR1", next(iter(jobs)))
    return root, jobs


def test_preempted_job_of_two_nodes_is_requeued_and_goes_on_bit_by_bit(slurm, settings, tmp_path):
    steps = 100
    folder, uninterrupted = tmp_path / "run", tmp_path / "whole"
    overrides = [*settings, *long_run(steps), f"output_dir={folder}"]
    nodes = ["--nodes=2", "--nodelist=node[1-2]", "--ntasks-per-node=1"]
    job = slurm.submit(*nodes, f"--output={tmp_path}/job.log", "slurm/train.sbatch", *overrides)
    slurm.wait_until(lambda: any(10 in part for part in logged_parts(folder)), "step 10")
    slurm.signal(job, "USR1")
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = run_config(plain_values(compose("train", overrides=[*overrides[:-1], f"output_dir={uninterrupted}"])))
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    values["trainer"] |= {"devices": 2, "num_nodes": 1}
    values["data"] |= {"num_workers": 0}
    train_ranks(values, 2, tmp_path / "whole.log")  # meanwhile: a requeued job is held for some seconds
    assert slurm.wait(job) == "COMPLETED", logs(tmp_path)

    first, second = starts(folder)
    saved = max(logged_parts(folder)[0]) + 1
    assert (first["step"], second["step"]) == (0, saved)
    assert 10 < saved < steps
    assert second["slurm"]["SLURM_RESTART_COUNT"] == "1"
    assert second["slurm"]["SLURM_JOB_NODELIST"] == "node[1-2]"
    assert {"versions", "git_commit", "command"} <= set(second)
    assert "torch==" in (folder / "packages.txt").read_text()
    assert sorted(path.name for path in (folder / "ranks").iterdir()) == [
        f"{job}-0.log", f"{job}-1.log", f"{job}-srun.log",
    ]  # fmt: skip
    said = (folder / "ranks" / f"{job}-0.log").read_text()
    assert f"stopped by a signal after step {saved} of {steps}, which is saved in {folder}" in said
    assert logged_losses(folder) == logged_losses(uninterrupted)
    assert sorted(logged_losses(folder)) == list(range(steps))


CRASHES = {
    "recovers": "{steps: [5], marks: %s, every: 4}",
    "fails": "{steps: [3], marks: %s, error: RuntimeError}",
    "refused": "{steps: [3], error: ValueError}",
}


@pytest.fixture(scope="module")
def crashing_jobs(slurm, settings, tmp_path_factory):
    """Runs of two nodes each whose second rank crashes, one restart allowed from each checkpoint."""
    root, jobs = tmp_path_factory.mktemp("crashing"), {}
    for name, crash in CRASHES.items():
        (root / name).mkdir()
        crash = crash.replace("{", "{_target_: crashing.Crash, ").replace("%s", str(root / name))
        overrides = [*settings, *long_run(14), "training.checkpoint_every_steps=4", f"output_dir={root / name / 'run'}"]
        environment = f"--export=ALL,MAX_RESTARTS=1,PYTHONPATH={Path(__file__).parent}"
        nodes = ["--nodes=2", "--ntasks-per-node=1", f"--output={root / name}/job.log", environment]
        jobs[name] = slurm.submit(*nodes, "slurm/train.sbatch", *overrides, f"+callbacks.crash={crash}")
    return root, jobs


@pytest.mark.parametrize(
    ("name", "steps", "said"),
    [
        ("recovers", [0, 4], "Killed; last line of its log: ."),
        ("fails", [0, 0], "Exited with exit code 70; last line of its log: RuntimeError: this rank's GPU has fallen"),
    ],
)
def test_slurm_says_of_a_crash_what_the_job_reads_and_the_run_goes_on(slurm, crashing_jobs, name, steps, said):
    root, jobs = crashing_jobs
    assert slurm.wait(jobs[name]) == "COMPLETED", logs(root / name)
    folder, log = root / name / "run", (root / name / "job.log").read_text()
    assert [start["step"] for start in starts(folder)] == steps
    assert sorted(logged_losses(folder)) == list(range(14)) and (folder / "final").is_dir()
    assert len(re.findall(rf"ended: \S+: task 1: {said}", log)) == log.count("restart 1 of 1 from") == 1


def test_a_user_s_error_is_not_requeued(slurm, crashing_jobs):
    root, jobs = crashing_jobs
    assert slurm.wait(jobs["refused"]) == "FAILED", logs(root / "refused")
    log = (root / "refused" / "job.log").read_text()
    assert len(starts(root / "refused" / "run")) == log.count(" restart 0,") == 1
    assert "task 1: Exited with exit code 1; last line of its log: [rank1]: ValueError: " in log
    assert not (root / "refused" / "run" / "crashes.log").exists()


def table_of(folder):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run_script("collect.py", f"folder={folder}") == ""
    assert (folder / "table.md").read_text() in printed.getvalue()
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


def ratios_of(table):
    return [(row["variant"], float(row["requested_ratio"])) for row in table]


def test_submitit_sweep_returns_every_ratio_in_one_table(slurm, settings, tmp_path):
    folder = tmp_path / "sweep"
    command = [sys.executable, "scripts/train.py", "-m", "compression.target_ratio=2,4", "hydra/launcher=slurm"]
    command += [*settings, f"output_dir={folder}", "hydra.launcher.timeout_min=5"]
    done = subprocess.run(command, cwd=ROOT, env=slurm.environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr + logs(folder)
    rows = table_of(folder)
    assert ratios_of(rows) == [("0/final", 2.0), ("1/final", 4.0)]
    assert all(float(row["value"]) > 0 and float(row["achieved_ratio"]) >= 1 for row in rows)


def test_array_sweep_trains_every_ratio_and_each_can_be_exported_again(slurm, settings, tmp_path):
    folder = tmp_path / "sweep"
    job = slurm.submit(
        "--array=2,4", "--ntasks-per-node=1", f"--output={tmp_path}/job-%a.log", "slurm/sweep.sbatch", *settings,
        f"output_dir={folder}",
    )  # fmt: skip
    assert set(slurm.wait(job).split()) == {"COMPLETED"}, logs(tmp_path)
    assert ratios_of(table_of(folder)) == [("cr2/final", 2.0), ("cr4/final", 4.0)]
    output = tmp_path / "exported"
    job = slurm.submit(f"--output={tmp_path}/job.log", "slurm/export.sbatch", f"run={folder}/cr2", f"output={output}")
    assert slurm.wait(job) == "COMPLETED", logs(tmp_path)
    assert (output / "model.safetensors").read_bytes() == (folder / "cr2" / "final" / "model.safetensors").read_bytes()


def test_one_command_trains_a_ramp_and_every_branch_of_it(slurm, settings, tmp_path):
    folder = tmp_path / "ramp"
    printed = slurm.call(
        "slurm/branches.sh", "--ntasks-per-node=1", f"--output={tmp_path}/job-%j.log", *settings,
        "training.milestones.ratios=[2.0,3.0]", "training.stages.retrofit.ramp_to=4", f"output_dir={folder}",
        seconds=120,
    )  # fmt: skip
    jobs = dict(line.split() for line in printed.splitlines())
    slurm.jobs += jobs
    assert [Path(place) for place in jobs.values()] == [folder, folder / "branches/cr2", folder / "branches/cr3"]
    assert {slurm.wait(job) for job in jobs} == {"COMPLETED"}, logs(tmp_path)
    assert ratios_of(table_of(folder)) == [
        ("branches/cr2/final", 2.0), ("branches/cr3/final", 3.0), ("ramp/final", 4.0),
    ]  # fmt: skip
    first = [starts(Path(place))[0]["step"] for place in jobs.values()]
    assert first[0] == 0 < first[1] < first[2]


@pytest.mark.parametrize("settings", [("--nodes=2", "replicas=2"), ("--nodes=1", "ranks=2")], ids=str)
def test_a_server_of_several_processes_answers_behind_one_address_and_ends_what_runs(
    slurm, folders, tmp_path, settings
):
    nodes, number = settings
    if number == "replicas=2":
        pytest.importorskip("ray.serve", reason="Ray is not installed: pip install '.[ray]'")
    log, others = tmp_path / "job.log", [f"model={folders.compressed}", "name=own", "port=0", "memory=20000000"]
    job = slurm.submit(nodes, f"--output={log}", "slurm/serve.sbatch", number, *others)
    slurm.wait_until(lambda: log.exists() and (" http://" in log.read_text() or slurm.state(job) != "RUNNING"), "start")
    assert slurm.state(job) == "RUNNING", log.read_text()
    url = re.search(r"own: (http://127.0.0.1:\d+)", log.read_text())[1]
    assert httpx.get(f"{url}/health", timeout=60).json().get("replicas") == (2 if number == "replicas=2" else None)
    asked = {"model": "own", "prompt": "line", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        slurm.call("scancel", "--batch", "--signal=USR1", job)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert slurm.wait(job) == "COMPLETED", log.read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda path: path.name)
def test_a_job_file_asks_for_what_exists(slurm, path):
    slurm.call("sbatch", "--test-only", "--ntasks-per-node=1", str(path))


def test_a_job_is_requeued_from_outside_its_container_also_when_it_does_not_stop_in_time(slurm, requeued_jobs):
    root, jobs = requeued_jobs
    states = {name: " ".join({*slurm.wait(job).split()}) for job, name in jobs.items()}
    assert states == dict.fromkeys(jobs.values(), "COMPLETED")
    cpus = {"array": 3, "endless": 4}  # of a node with 4
    for name, (on_signal, _, _) in TURNS.items():
        tasks = sorted((root / name).glob("job-*.log"))
        ranks = [path.read_text() for path in (root / name / "run").rglob("ranks/*-0.log")]
        assert len(tasks) == len(ranks) == (2 if name == "array" else 1), logs(root)
        assert all(path.read_text().count(", restart 1,") == 1 for path in tasks), logs(root)
        assert all(f"training with {cpus.get(name, 1)} CPUs" in text for text in ranks), logs(root)
        assert all(("saved" in text) == (on_signal == SAVES) and "finished" in text for text in ranks), logs(root)


@pytest.fixture
def smoke(slurm, settings, make_stock, tmp_path):
    """Return what runs the smoke job of an experiment on a tiny model and two nodes, and gives its log and folder."""
    model = tmp_path / "model"
    make_stock("qwen3", vocab_size=300).save_pretrained(model)
    texts = [path.read_text() for path in Path(settings[5].partition("=")[2]).parent.glob("*/*.txt")]
    train_tokenizer(texts, 300, tmp_path / "tokenizer").save_pretrained(model)
    run = [
        "experiment=qwen3_8b_dms_cr8", f"model={model}", "data=text_files",
        *[setting for setting in settings if "text.name" in setting],
        f"data.cache_folder={tmp_path}/cache", "data.num_workers=1", "trainer.accelerator=cpu", "trainer.shard_size=2",
        "trainer.precision=32-true", "compression.delay=4", "training.sequence_length=64", "training.batch_size=4",
        "training.micro_batch_size=1", "training.validation_sequences=4", f"output_dir={tmp_path}/run",
    ]  # fmt: skip

    def submit(*changes):
        nodes = ["--nodes=2", "--ntasks-per-node=1", f"--output={tmp_path}/job.log"]
        job = slurm.submit(*nodes, "slurm/smoke.sbatch", *run, *changes)
        state = slurm.wait(job)
        return state, (tmp_path / "job.log").read_text().splitlines(), tmp_path / f"run_smoke_{job}"

    return submit


def test_the_smoke_job_is_stopped_and_resumed_and_ends_with_what_it_measured(smoke, tmp_path):
    state, output, folder = smoke()
    assert state == "COMPLETED", "\n".join(output) + logs(folder)
    assert output[-1] == f"smoke: ok: 20 steps on 2 x CPU, hsdp, stopped after step 10 and resumed there: {folder}"
    assert [start["step"] for start in starts(folder)] == [0, 10]
    assert [sorted(part) for part in logged_parts(folder)] == [[*range(10)], [*range(10, 20)]]
    table = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in output if line.startswith("| ")}
    assert float(table["seconds per step"][0]) > 0 and float(table["tokens per second"][0].replace(",", "")) > 0
    assert table["peak of a rank, resident with Python and its libraries"][0].endswith(" GiB")
    assert table["MFU"][0] == "peak of CPU not known"
    assert "the whole run, 800 steps, in device-hours" in table
    assert not (folder / "checkpoints").exists() and not (folder / "final").exists()


def test_a_smoke_job_that_does_not_fit_ends_with_the_reason(smoke):
    state, output, _ = smoke("planner.device_memory_gib=0.0001")
    assert state == "FAILED" and output[-1].startswith("smoke: failed: plan: error: a rank needs "), "\n".join(output)
