"""The command `dmc`: its table, what it says of a wrong name, and what a shell completes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from dmc_cli.table import COMMANDS, main, spelled

ROOT = Path(__file__).resolve().parents[2]


def say(monkeypatch, capsys, *words, program="/somewhere/dmc"):
    """Return exit code, standard output and standard error of a command line."""
    monkeypatch.setattr(sys, "argv", [program, *words])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    finally:
        GlobalHydra.instance().clear()
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_each_command_has_a_module_settings_and_a_file_to_run():
    modules = {path.stem for path in (ROOT / "dmc/commands").glob("*.py") if "def main(settings" in path.read_text()}
    composed = {name for name, command in COMMANDS.items() if command.has_settings}
    assert composed == modules == {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    assert {path.stem for path in (ROOT / "scripts").glob("*.py")} == {*COMMANDS}
    assert {path.stem for path in (ROOT / "dmc_cli").glob("*.py")} >= {*COMMANDS} - composed
    for name in COMMANDS:
        lines = (ROOT / f"scripts/{name}.py").read_text().splitlines()
        door = [line for line in lines if line][1:]
        assert door[-3:] == ["from dmc_cli.table import run", 'if __name__ == "__main__":', f'    run("{name}")']
        assert len(door) == 3 or name == "gpu_check"  # which runs where nothing is installed
        opening = (ROOT / f"configs/{name}.yaml").read_text() if name in composed else f"# dmc {spelled(name)} "
        assert opening.startswith(f"# dmc {spelled(name)}")


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_alone_it_prints_a_line_for_each_command(words, monkeypatch, capsys):
    code, shown, _ = say(monkeypatch, capsys, *words)
    lines = shown.splitlines()
    assert code == 0 and [line.split()[0] for line in lines if line.startswith("  ")] == [*map(spelled, COMMANDS)]
    assert max(map(len, lines)) <= 100


def test_the_table_is_printed_without_torch_or_hydra():
    code = (
        "import sys; from dmc_cli.table import main; sys.argv = ['dmc']; main(); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "  train " in done.stdout and not {"torch", "hydra", "dmc"} & {*done.stderr.split()}


@pytest.mark.parametrize(
    ("name", "hint"),
    [("trian", "did you mean 'train'?"), ("import_gguff", "did you mean 'import-gguf'?"), ("x=1", "lists all")],
)
def test_an_unknown_command_is_one_line_with_the_nearest_name(name, hint, monkeypatch, capsys):
    code, shown, said = say(monkeypatch, capsys, name, "seed=1")
    assert code == 2 and not shown
    assert said.startswith(f"error: no command {name!r}: ") and hint in said and said.count("\n") == 1


def test_hydra_shows_what_can_be_set(monkeypatch, capsys):
    code, shown, _ = say(monkeypatch, capsys, "import-gguf", "--help")
    assert code == 0 and shown.startswith("import_gguf is powered by Hydra.") and "output: ???" in shown
    _, shown, _ = say(monkeypatch, capsys, "train", "training.batch_size=3", "--cfg", "job", "--package", "training")
    assert "batch_size: 3" in shown


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("dmc ", {"train", "import-gguf", "gpu-check"}),
        ("dmc im", {"import-gguf", "import-megatron"}),
        ("dmc train trainer=cpu_", {"trainer=cpu_bf16"}),
        (".venv/bin/dmc compare experiment=quickstart_compare seed=1 over", {"overwrite="}),
        ("dmc quickstart b", set()),
        ("dmc nonesuch b", set()),
    ],
)
def test_a_shell_completes_commands_and_settings(line, found, monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", line)
    code, shown, _ = say(monkeypatch, capsys, "-sc", "query=bash")
    assert code in (0, None) and (found <= {*shown.split()} if line == "dmc " else found == {*shown.split()})


def test_a_shell_learns_to_complete_by_hydras_function(monkeypatch, capsys):
    _, shown, _ = say(monkeypatch, capsys, "-sc", "install=bash")
    assert shown.rstrip().endswith("-F hydra_bash_completion dmc")


def test_commands_without_their_packages_say_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "hydra", None)
    monkeypatch.delitem(sys.modules, "dmc_cli.hydra_command", raising=False)
    code, _, _ = say(monkeypatch, capsys, "generate", "model=x")
    assert code.startswith("error: commands need more packages (") and code.endswith("'dmc-retrofit[train]'")


@pytest.mark.slow
def test_a_command_runs_as_a_module_a_file_and_by_name(tmp_path):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    said = []
    for words in (["-m", "dmc", "collect"], [str(ROOT / "scripts/collect.py")]):
        command = [sys.executable, *words, f"folder={tmp_path}"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 1
        said.append(done.stderr)
    assert said[0] == said[1] and "holds no run" in said[0]


def test_while_a_command_runs_its_command_line_is_whole(monkeypatch, capsys):
    """Lightning starts further ranks by it, and a result records it."""
    seen = []
    monkeypatch.setattr("dmc.commands.collect.main", lambda settings: seen.append([*sys.argv]))
    say(monkeypatch, capsys, "collect", "folder=a")
    assert seen == [["/somewhere/dmc", "collect", "folder=a"]]
