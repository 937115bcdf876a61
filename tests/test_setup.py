"""Which build of torch `setup_environment.sh` takes, with a Python and a pip that only record their calls."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = """\
#!/bin/bash
case "$*" in
    *find_spec*) cat installed 2>/dev/null ;;
    *"pip uninstall"*) rm -f installed ;;
    *"pip install"*torch==*--extra-index-url*) echo cpu >installed ;;
    *"pip install"*torch==*) echo cuda >installed ;;
esac
echo "$*" >>calls
"""


@pytest.fixture
def project(tmp_path):
    """A project with a .venv whose Python is a fake one."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("scripts/setup_environment.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(tmp_path / "python")
    return tmp_path


def set_up(project, torch=None, gpu=False, extras="train"):
    """Set up; return the message, and whether anything was installed."""
    tools = project / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("bash", "cat", "cksum", "sed", "rm", "dirname", "tee", "tail", "awk"):  # and no nvidia-smi
        if not (tools / name).exists():
            (tools / name).symlink_to(shutil.which(name))
    if gpu:
        (tools / "nvidia-smi").symlink_to("/bin/true")
    environment = {"PATH": str(tools), "PYTHON": str(project / "python")} | ({} if torch is None else {"TORCH": torch})
    (project / "calls").unlink(missing_ok=True)
    done = subprocess.run(
        [str(tools / "bash"), "scripts/setup_environment.sh", extras], cwd=project, env=environment, timeout=30,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == (not done.stderr.startswith("error: ")), done.stderr
    return done.stderr, "pip install" in (project / "calls").read_text()


@pytest.mark.parametrize(
    ("torch", "gpu", "build", "reason"),
    [
        (None, False, "cpu", "there is no nvidia-smi here (TORCH=cuda for jobs on other nodes that have GPUs)"),
        ("auto", True, "cuda", "there is an nvidia-smi"),
        ("cuda", False, "cuda", "TORCH=cuda"),
        ("cpu", True, "cpu", "TORCH=cpu"),
    ],
)
def test_the_build_of_torch_is_chosen_with_a_reason(project, torch, gpu, build, reason):
    message, installs = set_up(project, torch, gpu)
    assert installs and message.startswith(f"torch for {build}: {reason}\n")
    assert (project / "installed").read_text() == f"{build}\n"
    assert set_up(project, torch) == ("", False)


def test_another_build_is_replaced_when_it_is_asked_for_and_kept_otherwise(project):
    set_up(project)
    assert set_up(project, "cpu") == ("", False)
    message, _ = set_up(project, gpu=True, extras="train,dev")
    assert message.startswith("torch for cpu: it is installed") and "torch==" not in (project / "calls").read_text()
    assert set_up(project, "cuda", extras="train,dev")[1]
    assert (project / "installed").read_text() == "cuda\n"
    calls = (project / "calls").read_text()
    assert calls.index("pip uninstall") < calls.index("torch==")


def test_a_build_that_does_not_exist_is_refused(project):
    assert set_up(project, "rocm") == ("error: TORCH=rocm: expected cpu, cuda or auto\n", False)
