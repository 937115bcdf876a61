"""What every command does around its work, and settings that are told before it."""

import ast
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.plugins import Plugins
from scripts_here import run_script

from dmc import policies
from dmc.config import command_line
from dmc.config.command_line import prepare_process
from dmc_cli.table import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"


def test_a_warning_is_one_line_and_only_those_of_others_say_where(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch, "set_flush_denormal", bool)
    prepare_process()
    for filename, before in ((policies.__file__, "warning"), ("/other.py", "/other.py:3: UserWarning")):
        assert warnings.formatwarning("no room", UserWarning, filename, 3) == f"{before}: no room\n"


def test_a_sweep_is_submitted_without_the_accelerator_of_the_machine_that_submits_it(tmp_path, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    given = []
    launcher = SimpleNamespace(launch=lambda *_, **__: given.append(os.environ.get("DS_ACCELERATOR")) or [])
    monkeypatch.setattr(Plugins, "instantiate_launcher", lambda *_, **__: launcher)
    arguments = ["experiment=llama2_7b_cr4", "compression.target_ratio=2,4", f"output_dir={tmp_path}"]
    assert run_script("train.py", "-m", *arguments) == ""
    assert given == [None]


def test_a_sweep_takes_lists_and_lengths(tmp_path, monkeypatch):
    jobs = []
    launcher = SimpleNamespace(launch=lambda job_overrides, **_: jobs.extend(job_overrides) or [])
    monkeypatch.setattr(Plugins, "instantiate_launcher", lambda *_, **__: launcher)
    lengths = "training.stages.retrofit.length=5 steps,2B tokens"
    assert run_script("train.py", "-m", lengths, "training.snapshot_ratios=[2],[2,3]", f"output_dir={tmp_path}") == ""
    assert len(jobs) == 4
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        found = [compose("train", overrides=job).training for job in jobs]
    assert {run.stages.retrofit.length for run in found} == {"5 steps", "2B tokens"}
    assert [list(run.snapshot_ratios) for run in found] == [[2], [2, 3]] * 2


def test_denormal_numbers_are_flushed_in_a_prepared_process(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    prepare_process()
    try:
        assert not (torch.full((8,), 1e-37) * 0.01).any()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.slow
def test_no_thread_computes_with_denormal_numbers():
    code = "import torch; from dmc.config.command_line import prepare_process; "
    code += "torch.set_num_threads(2); prepare_process();"
    code += "print((torch.full((1 << 20,), 1e-37) * 0.01).count_nonzero().item())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "0"


def test_the_command_imports_hydra_alone_before_its_work():
    for path in (ROOT / "dmc_cli").glob("*.py"):
        imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
        others = {name.split(".")[0] for name in names} - sys.stdlib_module_names
        assert others <= {"hydra", "omegaconf", "dmc_cli"}, path


@pytest.mark.parametrize(
    "names", [["train"], pytest.param([*COMMANDS][:-1], marks=pytest.mark.slow)], ids=["train", "all"]
)
def test_help_and_a_misspelled_setting_import_hydra_alone(names):
    code = """if True:
    import sys
    from dmc_cli.table import main
    from hydra.core.global_hydra import GlobalHydra
    for name in sys.argv[1:]:
        for argument in ("--help", "nonesuch=1"):
            sys.argv[1:] = [name, argument]
            try:
                main()
            except SystemExit as stop:
                ended = stop.code
            GlobalHydra.instance().clear()
        assert "nonesuch" in ended and "\\n" not in ended, (name, ended)
        assert not {"dmc", "torch"} & sys.modules.keys(), name
    """
    found = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


GPUS = {"SLURM_JOB_ID": "1", "SLURM_GPUS_ON_NODE": "8"}


@pytest.mark.parametrize(
    ("environment", "files", "arguments", "refused"),
    [
        (GPUS, [], [], "this job has GPUs (SLURM_GPUS_ON_NODE=8), but torch 2.13.0+cpu is a build for CPUs: "),
        ({"SLURM_JOB_ID": "1"}, ["nvidia0", "nvidiactl"], [], "this job has GPUs ({folder}/nvidia0), but torch"),
        (GPUS, [], ["trainer=cpu"], None),
        (GPUS, [], ["plan=true"], None),
        ({"SLURM_JOB_ID": "1", "SLURM_GPUS_ON_NODE": "0"}, ["nvidiactl"], [], None),
        ({"SLURM_GPUS_ON_NODE": "8"}, ["nvidia0"], [], None),  # no job
    ],
)
def test_a_job_with_gpus_and_a_torch_for_cpus_is_refused(environment, files, arguments, refused, tmp_path, monkeypatch):
    for name in ("SLURM_JOB_ID", *command_line.GPUS_OF_JOB):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(command_line, "DEVICE_FILES", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        settings = compose("train", overrides=arguments)
    if refused is None:
        return command_line.check_torch_build(settings)
    with pytest.raises(ValueError, match=re.escape(refused.format(folder=tmp_path))) as error:
        command_line.check_torch_build(settings)
    assert "`TORCH=cuda ./scripts/setup_environment.sh train,slurm`" in str(error.value)


def test_a_script_refuses_a_torch_for_cpus_in_a_job_with_gpus(tmp_path, monkeypatch):
    for name, value in GPUS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "cuda", None)
    said = run_script("train.py", "debug=tiny", f"output_dir={tmp_path / 'run'}")
    assert said.startswith("error: this job has GPUs (SLURM_GPUS_ON_NODE=8)") and not (tmp_path / "run").exists()
