import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from composing import settings_of
from documents import PAGES, ROOT, TEXT, commands

SCRIPTS = [command for command in commands() if re.match(r"(python scripts|\./scripts)/", command)]
JOBS = [
    found.groups() for command in commands() if (found := re.search(r"sbatch .*?(slurm/\w+\.sbatch) ?(.*)", command))
]


@pytest.mark.parametrize("command", SCRIPTS)
def test_every_command_names_a_script_and_settings_that_exist(command):
    words = [word for word in shlex.split(command) if word not in ("python", "-m")]
    script = ROOT / words[0]
    assert script.is_file()
    if script.suffix == ".py" and not (ROOT / "configs" / f"{script.stem}.yaml").is_file():
        assert len(words) == 1  # it has no settings
    elif script.suffix == ".py":
        overrides = words[1:]
        if "-m" in shlex.split(command):  # of a sweep the first value
            overrides = [re.sub(r"=([^,\s]+),\S+$", r"=\1", word) for word in overrides]
        settings_of(script.stem, *overrides)


@pytest.mark.parametrize("command", SCRIPTS)
def test_every_command_is_pasted_into_bash_and_zsh_as_it_is(command):
    outside = re.sub(r"'[^']*'", "", command)
    assert not set(outside) & set("[]{}*?~"), command


@pytest.mark.parametrize(("job", "settings"), JOBS)
def test_every_job_file_exists_and_its_settings_compose(job, settings):
    assert (ROOT / job).is_file()
    name = {"train": "train", "sweep": "train", "smoke": "train", "export": "export"}.get(Path(job).stem)
    if name is not None:
        settings_of(name, *shlex.split(settings))


def test_files_that_pages_name_exist():
    named = re.findall(r"`((?:dmc|configs|scripts|notebooks|docs|slurm|benchmarks)/[\w/]+\.\w+)`", TEXT)
    assert len(named) > 60
    assert [name for name in named if "foo" not in name and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_a_heading(path):
    text = re.sub(r"```.*?```|`[^`]*`", "", PAGES[path], flags=re.S)
    for name, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), name
        headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.M) if anchor else []
        slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{name}#{anchor}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_table_has_a_head_and_a_rule(path):
    blocks = re.findall(r"(?:^\|.*\n)+", re.sub(r"```.*?```", "", PAGES[path], flags=re.S), flags=re.M)
    for block in blocks:
        head, rule, *_ = [*block.splitlines(), ""]
        assert re.fullmatch(r"\|(:?-+:?\|)+", rule) and head.count("|") == rule.count("|"), block[:80]


def test_the_readme_is_short_and_lists_every_page():
    readme = PAGES[ROOT / "README.md"]
    assert len(readme.splitlines()) <= 200
    pages = {path.name for path in PAGES if path.parent == ROOT / "docs"} - {"index.md", "api.md"}
    assert pages <= set(re.findall(r"docs/(\w+\.md)", readme))


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={"NO_MKDOCS_2_WARNING": "1", "PATH": ""}
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    built = {path.parent.name for path in tmp_path.rglob("index.html")}
    assert {path.stem for path in PAGES if path.parent == ROOT / "docs"} - {"index"} <= built
