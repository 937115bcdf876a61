"""What people write on a command line, and what Hydra is given of it."""

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
from omegaconf import OmegaConf
from scripts_here import SCRIPTS, run_script

from dmc import policies
from dmc.config import command_line
from dmc.config.command_line import plain_settings, prepare_process

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def composed(name, *arguments):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        settings = compose(name, overrides=plain_settings(name, arguments, CONFIGS))
    return OmegaConf.to_container(settings)


def test_a_model_and_tasks_are_given_by_name():
    assert composed("generate", "model=some/DIR")["model"]["path"] == "some/DIR"
    settings = composed("compare", "models={base: DIR}", "policies=h2o", "budgets=4,tokens:9", "tasks=mmlu,cs_qa")
    assert (settings["policies"], settings["tasks"]) == (["h2o"], ["mmlu", "cs_qa"])
    assert (settings["models"], settings["budgets"]) == ({"base": "DIR"}, [4, "tokens:9"])


@pytest.mark.parametrize("name", ["generate", "benchmark", "train", "prepare_data"])
@pytest.mark.parametrize("model", ["folder", "meta-llama/Llama-2-7b-hf", "./llama2_7b"])
def test_every_script_takes_a_folder_or_a_hub_name(name, model, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = composed(name, f"model={model}")
    assert settings["model"]["path"] == model
    assert settings["model"].get("fresh") is None and settings["model"].get("architecture") is None


@pytest.mark.parametrize("name", ["train", "prepare_data"])
def test_a_choice_of_settings_stays_one(name, tmp_path, monkeypatch):
    (tmp_path / "llama2_7b").mkdir()  # a folder of the same name is ./llama2_7b
    monkeypatch.chdir(tmp_path)
    for choice in ("llama2_7b", "llama2_7b,llama2_13b", "mispelled"):
        assert plain_settings(name, [f"model={choice}", "-m"], CONFIGS) == [f"model={choice}", "-m"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("tasks=piqa", "tasks=[piqa]"),
        ("budgets=2,tokens:128", "budgets=[2,tokens:128]"),
        ("tasks=gsm8k,{name: mmlu, num_fewshot: 5}", "tasks=[gsm8k,{name: mmlu, num_fewshot: 5}]"),
        ("tasks=[piqa]", "tasks=[piqa]"),
        ("tasks.0.num_samples=1", "tasks.0.num_samples=1"),
        ("model.path=a,b", "model.path=a,b"),
        ("model={path: a}", "model={path: a}"),
        ("--cfg|job", "--cfg|job"),
        ("-m|model=a/x,b/x", "-m|model.path=a/x,b/x"),
        ("-m|tasks=piqa,copa", "-m|tasks=[piqa],[copa]"),
        ("--multirun|policies=[],[full]", "--multirun|policies=[],[full]"),
        ("-m|tasks=piqa,[copa,rte]", "-m|tasks=piqa,[copa,rte]"),
    ],
)
def test_lists_and_sweeps(arguments, expected):
    assert plain_settings("generate", arguments.split("|"), CONFIGS) == expected.split("|")


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


def test_no_thread_computes_with_denormal_numbers():
    code = "import torch; from dmc.config.command_line import prepare_process; "
    code += "torch.set_num_threads(2); prepare_process();"
    code += "print((torch.full((1 << 20,), 1e-37) * 0.01).count_nonzero().item())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "0"


def test_help_and_a_misspelled_setting_do_not_wait_for_pytorch():
    code = """if True:
    import runpy, sys
    from hydra.core.global_hydra import GlobalHydra
    for path in sys.argv[1:]:
        for argument in ("--help", "nonesuch=1"):
            sys.argv[1:] = [argument]
            try:
                runpy.run_path(path, run_name="__main__")
            except SystemExit as stop:
                told = stop.code
            GlobalHydra.instance().clear()
        assert "nonesuch" in told, path
        loaded = {"torch", "transformers", "lightning", "pandas", "matplotlib"} & sys.modules.keys()
        assert not loaded, (path, loaded)
    """
    scripts = [path for path in SCRIPTS.glob("*.py") if path.stem not in ("gpu_check", "quickstart")]  # without Hydra's
    found = subprocess.run([sys.executable, "-c", code, *scripts], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("inside", ["", "/new"])
@pytest.mark.parametrize(
    "command",
    [
        "benchmark.py|model=model|output={file}",
        "compare.py|models={{base: model}}|output={file}",
        "export.py|run=model|output={file}",
        "report.py|folders=model|output={file}",
        "study.py|output={file}",
        "train.py|output_dir={file}",
    ],
)
def test_an_output_that_is_a_file_is_told_and_left_as_it_is(command, inside, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "notes").write_text("mine")
    told = run_script(*command.format(file=f"notes{inside}").split("|"))
    name = command.split("|")[-1].partition("=")[0]
    assert told == f"error: {name}=notes{inside}: notes is a file; give a folder, a new one or one that is there"
    assert (tmp_path / "notes").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "notes"]


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
