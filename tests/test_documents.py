import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from composing import settings_of
from documents import PAGES, ROOT, TEXT, commands
from hydra.errors import HydraException

from dmc_cli.table import COMMANDS, spelled

COMMAND_LINES = [line for line in commands() if re.match(r"dmc [a-z]|\./scripts/", line)]
JOBS = [
    found.groups() for command in commands() if (found := re.search(r"sbatch .*?(slurm/\w+\.sbatch) ?(.*)", command))
]


@pytest.mark.parametrize("command", COMMAND_LINES)
def test_every_command_and_its_settings_exist(command):
    program, *words = shlex.split(command)
    if program != "dmc":
        assert (ROOT / program).is_file()
        return
    name = words[0].replace("-", "_")
    assert words[0] == spelled(name) and name in COMMANDS
    overrides = [word for word in words[1:] if word != "-m"]
    if "-m" in words:  # of a sweep the first value
        overrides = [re.sub(r"=([^,\s]+),\S+$", r"=\1", word) for word in overrides]
    if COMMANDS[name].has_settings:
        settings_of(name, *overrides)


SETTINGS = sorted(
    span
    for span in {*re.findall(r"(?<!`)`([^`\n]+)`(?!`)", TEXT)}
    if re.fullmatch(r"""(['"]?\+?[a-z_]+\.[\w.]+=[^` ]+['"]?( |$))+""", span)
)
BESIDE = [
    ("train",),
    ("train", "training=retrofit_measured", "callbacks=[evaluation]", "data=text_files"),
    ("train", "training=regress_distill", "data=mixed"),
    ("compare", "experiment=leaderboard"),
    *((name,) for name, command in COMMANDS.items() if command.has_settings),
]
"""Commands, and what they have beside the settings that pages name alone."""


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_named_alone_exist_in_a_command(settings):
    for name, *others in BESIDE:
        try:
            settings_of(name, *others, *shlex.split(settings))
        except HydraException:
            continue
        return
    raise AssertionError(f"no command has {settings}")


def test_pages_spell_commands_in_one_way():
    lines = [line for line in commands() if re.search(r"\bscripts/\w+\.py", line)]
    assert [line for line in lines if not re.match(r"torchrun |scripts/\w+\.py$", line)] == []
    assert not re.search(
        r"dmc-(train|demo|compare|serve|generate)\b|`\w*(train|compare|serve|generate|report)\.py`", TEXT
    )


@pytest.mark.parametrize("command", COMMAND_LINES)
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


def test_the_first_screen_of_the_readme_holds_a_figure_a_table_and_both_commands():
    screen = "\n".join(PAGES[ROOT / "README.md"].splitlines()[:40])
    assert len(re.findall(r"<img|!\[", screen)) == 1
    assert "`./scripts/quickstart.sh`" in screen and "`./scripts/test.sh`" in screen and "**Status.**" in screen
    headline = re.search(r"<!-- headline.*?-->(.*)<!-- end of headline -->", screen, flags=re.S)[1]
    _, _, *rows = [line for line in headline.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and "±" not in PAGES[ROOT / "README.md"]
    results = PAGES[ROOT / "docs/results.md"]
    for row in rows:
        numbers = re.findall(r"(?<!\w)\d[\d.,]*", row)
        assert 1 <= len(numbers) <= 3 and [number for number in numbers if number not in results] == []


def sentences(text):
    """Return the sentences of a page and of its cells, each command and each formula as one word."""
    text = re.sub(r"```.*?```|<!--.*?-->|<img[^>]*>|^#[^\n]*", "\n\n", text, flags=re.S | re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "command", text))
    parts = re.split(r"\n\s*\n|\n- |\n(?=\|)|\|", re.sub(r"(\d) ± (\d)", r"\1±\2", text).replace(" %", "%"))
    return [sentence for part in parts for sentence in re.split(r"(?<=[.!?])\s+", part) if sentence.strip()]


@pytest.mark.parametrize("name", ["README.md", "docs/results.md", "docs/commands.md"])
def test_no_sentence_is_longer_than_25_words(name):
    lengths = {sentence: len(sentence.split()) for sentence in sentences(PAGES[ROOT / name])}
    assert [sentence for sentence, length in lengths.items() if length > 25] == []


def test_results_are_ten_tables_each_with_a_command_and_what_it_says():
    before, *tables = re.split(r"^Table (?=\d)", PAGES[ROOT / "docs/results.md"], flags=re.M)
    assert [int(table.split(".")[0]) for table in tables] == [*range(1, 11)] and "\n|" not in before
    for table in tables:
        above, rows, below = re.match(r"(.*?)((?:\n\|[^\n]*)+)\n(.*)", table, flags=re.S).groups()
        assert re.search(r"`dmc |\ndmc |\./scripts/", above), above
        assert below.startswith("\n- ") and "\n|" not in below
        assert rows.count("\n") > 4


def test_the_number_of_training_free_methods_is_the_same_everywhere():
    other = {"full", "random", "marked", "kvpop"}  # no method, controls, and a learned one
    names = {path.stem for path in (ROOT / "configs/policy").glob("*.yaml")}
    assert other < names
    pages = {name: (ROOT / name).read_text() for name in ("README.md", "docs/methods.md", "CHANGELOG.md")}
    for name, text in pages.items():
        assert f"{len(names - other)} training-free methods" in text, name
    for text in [*pages.values(), *PAGES.values()]:
        counts = re.findall(r"(?i)\b(\d+|seventeen|twenty\S*)\s+(?:training-free\s+)?(?:methods|policies)\b", text)
        assert {*counts} <= {str(len(names - other))}
    (sentence,) = re.findall(r"There are \d+ training-free methods:[^.]*\.", pages["docs/methods.md"])
    assert other <= set(re.findall(r"`(\w+)`", sentence))
