"""What runs by itself: `.ci/run` with scripts that only record their calls, and GitHub's workflow, which calls it."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
RECORD = '#!/bin/bash\necho "$(basename "$0") $*" >>calls\n'
SET_UP = """\
TEST_EXTRAS=dev
setup_environment() {
    mkdir -p .venv/bin
    for tool in ruff mypy lint-imports; do cp scripts/test.sh .venv/bin/$tool; done
}
"""
STYLE = ["ruff check .", "ruff format --check .", "mypy", "lint-imports --no-logo"]


@pytest.fixture
def project(tmp_path):
    """A project without history, whose tests only record how they were called, and few of the machine's tools."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/setup_environment.sh").write_text(SET_UP)
    (tmp_path / "scripts/test.sh").write_text(RECORD)
    (tmp_path / "scripts/test.sh").chmod(0o755)
    (tmp_path / "tools").mkdir()
    for name in ("bash", "basename", "cp", "date", "dirname", "git", "mkdir", "rm"):
        (tmp_path / "tools" / name).symlink_to(shutil.which(name))
    return tmp_path


def calls_of(project, *arguments):
    environment = {"PATH": str(project / "tools"), "GIT_CEILING_DIRECTORIES": str(project.parent)}
    command = [str(project / "tools/bash"), ".ci/run", *arguments]
    subprocess.run(command, cwd=project, env=environment, timeout=30, check=True)
    return [line.rstrip() for line in (project / "calls").read_text().splitlines()]


@pytest.mark.parametrize(("tier", "call"), [("quick", "test.sh"), ("full", "test.sh --full")])
def test_a_tier_runs_after_style_and_types(project, tier, call):
    assert calls_of(project, tier) == [*STYLE, call]


@pytest.mark.parametrize("commits", [1, 8])
def test_a_sixth_of_the_rest_follows_the_quick_tier_chosen_by_the_number_of_commits(project, commits):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(project)]
    subprocess.run([*git, "init", "-q"], check=True)
    for _ in range(commits):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    assert calls_of(project) == [*STYLE, "test.sh", f"test.sh --rest={commits % 6}/6"]


def test_without_history_the_day_chooses_the_sixth(project):
    *before, rest = calls_of(project)
    assert before == [*STYLE, "test.sh"] and rest in {f"test.sh --rest={part}/6" for part in range(6)}


def test_a_shallow_clone_whose_count_would_never_change_goes_by_the_day_too(project):
    source, git = project / "source", ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q", str(source)], check=True)
    for _ in range(2):
        subprocess.run([*git, "-C", str(source), "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    subprocess.run([*git, "clone", "-q", "--depth=1", f"file://{source}", str(project / "clone")], check=True)
    (project / "clone/.git").rename(project / ".git")
    (project / "tools/date").unlink()
    (project / "tools/date").write_text("#!/bin/bash\necho $((86400 * 20003))\n")
    (project / "tools/date").chmod(0o755)
    assert calls_of(project)[-1] == f"test.sh --rest={20003 % 6}/6"


def test_an_unknown_tier_is_refused_before_the_environment_goes(project):
    (project / ".venv").mkdir()
    command = [str(project / "tools/bash"), ".ci/run", "all"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (2, "error: .ci/run all: expected quick, full or nothing\n")
    assert (project / ".venv").is_dir()


def test_the_workflow_runs_the_quick_tier_on_a_push_and_all_at_night():
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    assert set(workflow[True]) == {"push", "pull_request", "schedule", "workflow_dispatch"}  # YAML 1.1 reads `on` so
    for name, job in workflow["jobs"].items():
        (command,) = [step["run"] for step in job["steps"] if "run" in step]
        assert command == f"./.ci/run {name}" and (ROOT / ".ci/run").stat().st_mode & 0o111
        (python,) = [step["with"]["python-version"] for step in job["steps"] if "python" in step.get("uses", "")]
        assert python == "3.11"
    events = {name: set(workflow[True]) & set(job["if"].split("'")[1::2]) for name, job in workflow["jobs"].items()}
    assert events == {"quick": {"push", "pull_request"}, "full": {"schedule", "workflow_dispatch"}}
