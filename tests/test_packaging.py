"""What `pip install` brings: the command `dmc`, its settings, and the main job, without a checkout."""

import importlib.metadata
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from documents import commands, examples
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from scripts_here import run_script
from short_quickstart import BASE, RETROFIT

from dmc import Engine, SamplingParams, load_model
from dmc.data import StandardLibrarySource, build_packed
from dmc.models.loading import load_tokenizer
from dmc.results.statistics import summarize
from dmc.results.store import Store
from dmc.results.tasks import FactRecall
from dmc.training.measure import score_text
from dmc.training.record import read_config
from dmc.training.text_data import TextData

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
KEPT = {"dmc", "dmc_cli", "configs", "pyproject.toml", "setup.py", "README.md", "LICENSE"}
KINDS = (".py", ".yaml")


def test_there_is_one_command():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"] == {"dmc": "dmc_cli.table:main"}


COMMANDS = """
import contextlib, sys
from dmc_cli.table import main
from hydra.core.global_hydra import GlobalHydra
for command in (
    "train experiment=quickstart_tiny_base plan=true",
    "compare models={base:nowhere} policies=[full,h2o] --cfg job",
    "demo",
    "train --help",
):
    sys.argv = ["dmc", *command.split()]
    with contextlib.suppress(SystemExit):
        main()
    GlobalHydra.instance().clear()
"""


def test_a_pin_leaves_out_the_pythons_that_its_package_refuses():
    pins = [
        Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    installed = {canonicalize_name(dist.metadata["Name"]): dist for dist in importlib.metadata.distributions()}
    refused = [
        f"{pin} on {version}, needs Python {needed}"
        for pin in pins
        if (package := installed.get(canonicalize_name(pin.name))) and package.version in pin.specifier
        for needed in [package.metadata["Requires-Python"] or ""]
        for version in ("3.10.0", "3.11.0", "3.12.0", "3.13.0")
        if version not in SpecifierSet(needed)
        and (pin.marker is None or pin.marker.evaluate({"python_full_version": version, "python_version": version[:4]}))
    ]
    assert not refused


ANSWER = """
from pathlib import Path
from dmc import Engine, SamplingParams, load_model
from dmc.kernels.cpu_build import _built
engine = Engine(load_model("outputs/quickstart_tiny/retrofit/final"))
(answer,) = engine.generate([list(range(200))], SamplingParams(max_new_tokens=16, temperature=0.0))
print(Path(_built()._name).name if _built() else None, answer.token_ids)
"""


def greedy_answer():
    """Answer the prompt of ANSWER by the reference kernels."""
    engine = Engine(load_model("outputs/quickstart_tiny/retrofit/final"), kernels="reference")
    (answer,) = engine.generate([list(range(200))], SamplingParams(max_new_tokens=16, temperature=0.0))
    return answer.token_ids


def check_measurements(folder, shown):
    """Recompute what the table says of the control, from its weights and the text."""
    frame = Store(folder / "cells.jsonl").frame()
    recall, loss = (
        summarize(frame[frame["task"] == f"stdlib {name}"]).set_index("title") for name in ("recall", "loss")
    )
    baselines = [f"control, {name}, bytes of retrofit" for name in ("h2o", "tova", "snapkv")]
    for lines in (recall, loss):
        assert {*lines.index} == {"base, full", "control, full", "retrofit, learned, CR 4", *baselines}
        assert {*lines["split"]} == {"test"} and lines.loc["control, full", "achieved_ratio"] == 1
        size = lines.loc["retrofit, learned, CR 4", "bytes_per_token"]
        assert size < lines.loc["control, full", "bytes_per_token"]
        # 64 tokens are few blocks
        assert lines.loc[baselines, "bytes_per_token"].between(size / 1.02, size * 1.25).all()
    assert {*recall["question"]} == {"hidden"} and {*recall["samples"]} == {16 * 2} and {*loss["samples"]} == {8}
    tokenizer, control = load_tokenizer(folder / "base/final"), load_model(folder / "control/final")
    source, cache = StandardLibrarySource("test"), str(folder / "cache")
    windows = build_packed(source, tokenizer, 64, cache)
    texts = torch.stack([windows[round(i * (len(windows) - 1) / 7)]["input_ids"] for i in range(8)])
    options = {"keys": 2, "num_keys": 5, "lengths": [64], "questions": 2, "cache_folder": cache}
    samples = FactRecall(haystack=source, **options).samples(tokenizer, len(tokenizer))
    with torch.no_grad():
        logits = control(texts).logits[:, 47:-1].transpose(1, 2)
        answers = [
            int(control(torch.tensor([sample.prompt + sample.after])).logits[0, -1].argmax()) for sample in samples
        ]
    assert loss.loc["control, full", "value"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, texts[:, 48:])), abs=1e-5
    )
    right = [answer == sample.continuation[0] for answer, sample in zip(answers, samples, strict=True)]
    assert recall.loc["control, full", "value"] == pytest.approx(sum(right) / len(right))
    lines = {line.split("  ")[0]: line for line in shown.splitlines()}
    for title, name in {"control, full": "control full cache", "retrofit, learned, CR 4": "retrofit (learned)"}.items():
        right, lost = recall.loc[title], loss.loc[title]
        assert f" {right['value'] * right['samples']:.0f} of {right['samples']} (" in lines[name]
        assert f" {right['bytes_per_token']:,.0f} (" in lines[name] and f" {lost['value']:.3f}" in lines[name]
    assert "outputs/quickstart_tiny/report/report.html" in shown and "stdlib recall: " in shown
    assert "retrofit (learned)" in (folder / "report/report.html").read_text()
    assert re.search(r"^\d+ s in all. The page with all plots and tables: ", shown, flags=re.M)
    data = TextData(read_config(folder / "retrofit"), tokenizer, total_steps=1)
    contexts, measured = data.held_out("calibration", has_questions=False), folder / "retrofit/final/retrofit.json"
    assert json.loads(measured.read_text())["metrics"]["achieved_ratio_on_calibration_text"] == pytest.approx(
        score_text(load_model(folder / "retrofit/final"), contexts).achieved_ratio, rel=1e-5
    )


@pytest.mark.slow
def test_an_installed_wheel_runs_the_main_job_from_an_empty_folder(tmp_path, monkeypatch, capsys):
    home = tmp_path / "empty"

    def run(*command, **variables):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "COLUMNS": "200", **variables}
        done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "WARNING" not in done.stderr, done.stderr  # of a library: nothing that a user would ask about
        return done.stdout

    home.mkdir()
    source = tmp_path / "source"  # a build writes beside what it builds
    shutil.copytree(ROOT, source, ignore=lambda folder, names: {*names} - KEPT if Path(folder) == ROOT else set())
    offline = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    pip = (sys.executable, "-m", "pip")
    compiles = platform.machine() == "x86_64" and shutil.which("c++") is not None
    wheel_of = (*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source))
    run(*wheel_of, DMC_CPU_KERNELS=str(int(compiles)), CXX="env c++")
    (wheel,) = tmp_path.glob("*-py3-none-*.whl")
    assert ("linux_x86_64" in wheel.name) == compiles
    run(*pip, "install", *offline, "--target", str(tmp_path / "site"), str(wheel))
    shutil.rmtree(source)
    installed = tmp_path / "site" / "dmc"
    for folder, there in (("configs", installed / "configs"), ("dmc_cli", tmp_path / "site" / "dmc_cli")):
        kept = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.*") if path.suffix in KINDS}
        assert {path.relative_to(there) for path in there.rglob("*.*")} >= kept
    for kernels in (installed / "kernels").glob("*.so"):
        needed = re.findall(rb"GLIBC_(\d+)\.(\d+)", kernels.read_bytes())
        assert max((int(major), int(minor)) for major, minor in needed) <= (2, 28)  # that of torch's own wheels
    binaries = tmp_path / "site" / "bin"
    assert [path.name for path in binaries.glob("dmc*")] == ["dmc"]
    assert "  import-megatron " in run(str(binaries / "dmc"))
    shown = run(sys.executable, "-c", COMMANDS)
    assert re.search(r"pretrain +2,400 steps", shown) and "h2o" in shown
    assert "pretrain, regress, regress_distill, retrofit" in shown and "callbacks: device_stats" in shown
    answered = dict(re.findall(r"^(.+?):.*, (\d) of 6 answered", shown, flags=re.M))
    assert min(answered["full cache"], answered["learned"]) >= "5" and max(answered["H2O"], answered["SnapKV"]) <= "3"
    assert not [*home.iterdir()]

    # The main job, shortened, with the kernels that came along: here is no compiler.
    alone = {"CXX": "/nowhere", "XDG_CACHE_HOME": str(tmp_path / "cache")} if compiles else {}
    from_scratch = ("base=tiny", "--base", *BASE, "--retrofit", *RETROFIT)
    shown = run(str(binaries / "dmc"), "quickstart", *from_scratch, **alone)
    monkeypatch.chdir(home)
    check_measurements(home / "outputs/quickstart_tiny", shown)
    if compiles:
        # what ran so far used the best level of this machine
        library, tokens = run(sys.executable, "-c", ANSWER, ATEN_CPU_CAPABILITY="avx2", **alone).split(maxsplit=1)
        assert library == "cpu_avx2.so" and json.loads(tokens) == greedy_answer()

    monkeypatch.syspath_prepend(home)
    stamps = {p: p.stat().st_mtime_ns for p in home.rglob("model.safetensors")}
    assert not run_script("quickstart.py", *from_scratch)  # it is all there
    assert {p: p.stat().st_mtime_ns for p in home.rglob("model.safetensors")} == stamps

    # The examples and commands of README and docs that stand on the models of the main job, here the tiny ones.
    for name, there in (("quickstart", "quickstart_tiny"), ("models/smollm2-135m", "quickstart_tiny/base/final")):
        (home / "outputs" / name).parent.mkdir(exist_ok=True)
        (home / "outputs" / name).symlink_to(home / "outputs" / there)
    files = [file for file, _ in examples()]
    for file, code in examples():
        (home / file).write_text(code)
        runpy.run_path(file, run_name="__main__")
    extensions = {Path(file).stem for file in files if not file.startswith("example_")}
    assert {"key_norm", "first_token", "numbers_source"} <= extensions
    for words in map(shlex.split, commands()):
        named = any(f"{name}." in word for name in extensions for word in words)
        if words[0] == "dmc" and (named or "output_dir=outputs/local_prior" in words):
            assert not run_script(f"{words[1]}.py", *words[2:])
    assert "key_norm" in (home / "outputs/compare/table.md").read_text()

    capsys.readouterr()
    model = "model=outputs/quickstart_tiny/retrofit/final"
    assert not run_script("generate.py", model, "prompt=import os", "max_new_tokens=8")
    assert capsys.readouterr().out.startswith("import os")
    assert not run_script("export.py", "run=outputs/quickstart_tiny/retrofit", "output=exported")
    assert "is not empty" in run_script("export.py", "run=outputs/quickstart_tiny/retrofit", "output=exported")
