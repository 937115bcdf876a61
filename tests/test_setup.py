"""Which build of torch `setup_environment.sh` takes, with a Python and a pip that only record their calls."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = """\
#!/bin/bash
case "$*" in
    *find_spec*) cat installed 2>/dev/null ;;
    *"pip --version"*) [ ! -e no_pip ] || exit 1 ;;
    *"-m venv"*) rm -f no_pip ;;
    *"pip install"*torch==*) [ ! -e killed ] || . ./killed ;;&
    *"pip uninstall"*) rm -f installed ;;
    *"pip install"*torch==*) [ ! -e unreachable ] || exit 1 ;;&
    *"pip install"*constraints.txt*) [ ! -e incomplete ] || exit 1 ;;&
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


def set_up(project, torch=None, gpu=False, extras="train", is_killed=False):
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
        start_new_session=True, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not is_killed:
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
    assert "--force-reinstall --no-deps torch==" in (project / "calls").read_text()


def test_a_build_that_cannot_be_fetched_leaves_the_one_that_is_there(project):
    set_up(project)
    (project / "unreachable").touch()
    with pytest.raises(AssertionError, match="torch for cuda"):
        set_up(project, "cuda")
    assert (project / "installed").read_text() == "cpu\n"
    (project / "unreachable").rename(project / "incomplete")
    with pytest.raises(AssertionError, match="torch for cuda"):
        set_up(project, "cuda")
    (project / "incomplete").unlink()
    assert set_up(project, "cuda")[1] and (project / "installed").read_text() == "cuda\n"


def test_an_environment_that_was_killed_on_its_way_is_set_up_again(project):
    set_up(project)
    (project / "no_pip").touch()  # by a kill of `python -m venv`
    assert set_up(project) == ("", False) and not (project / "no_pip").exists()
    (project / "killed").write_text("rm -f installed; kill -9 0\n")
    set_up(project, "cuda", is_killed=True)
    (project / "killed").unlink()
    message, installs = set_up(project)
    assert installs and message.startswith("torch for cpu: ") and (project / "installed").read_text() == "cpu\n"
    assert set_up(project) == ("", False)


CODE, RECORD = "torch/version.py", "torch-2.13.0.dist-info/RECORD"


@pytest.mark.parametrize(
    ("files", "build"),
    [
        ({}, ""),
        ({CODE: "cuda = '13.0'; hip = None"}, ""),  # half of it is copied: pip writes RECORD last
        ({CODE: "cuda = '13.0'; hip = None", "torch-2.13.0.dist-info/METADATA": "Name: torch\n"}, ""),
        ({RECORD: f"{CODE},,"}, ""),
        ({CODE: "cuda = '13.0'; hip = None", RECORD: f"{CODE},,"}, "cuda"),
        ({CODE: "cuda = hip = None", RECORD: f"{CODE},,"}, "cpu"),
    ],
    ids=["none", "half", "without RECORD", "removed", "cuda", "cpu"],
)
def test_a_part_of_torch_is_none(project, files, build):
    for name, text in files.items():
        (project / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (project / "site" / name).write_text(text)
        if name.startswith("torch/"):
            (project / "site" / "torch" / "__init__.py").touch()
    (project / "python").write_text(f'#!/bin/bash\nPYTHONPATH=site exec {sys.executable} -S "$@"\n')
    command = ["bash", "-c", ". scripts/setup_environment.sh; torch_build"]
    assert subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout.strip() == build


def test_a_build_that_does_not_exist_is_refused(project):
    assert set_up(project, "rocm") == ("error: TORCH=rocm: expected cpu, cuda or auto\n", False)


def test_a_damaged_half_replaces_no_good_model(tmp_path):
    for number, text in enumerate(("good ", "model"), start=1):
        (tmp_path / f"parcel-{number}").mkdir()
        (tmp_path / f"parcel-{number}" / f"tiny.gguf.half-{number}").write_text(text)
    shutil.copy(ROOT / "scripts" / "gpu_install.sh", tmp_path / "parcel-1" / "install.sh")
    digest = hashlib.sha256(b"good model").hexdigest()
    (tmp_path / "parcel-1" / "model.sha256").write_text(f"{digest}  tiny.gguf\n")
    command = ["bash", str(tmp_path / "parcel-1" / "install.sh")]
    for half, code in (("model", 0), ("mouse", 1)):
        (tmp_path / "parcel-2" / "tiny.gguf.half-2").write_text(half)
        assert subprocess.run(command, capture_output=True, check=False).returncode == code
        assert (tmp_path / "tiny.gguf").read_text() == "good model"
    assert not (tmp_path / "tiny.gguf.part").exists()
