"""What `pip install` brings: every script as a command, with its settings, without a checkout."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from short_quickstart import BASE, RETROFIT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
KEPT = {"dmc", "configs", "scripts", "pyproject.toml", "setup.py", "README.md", "LICENSE"}
KINDS = (".py", ".yaml")
SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if "def main(" in path.read_text())


def test_every_script_is_a_command():
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert commands == {f"dmc-{name.replace('_', '-')}": f"dmc.scripts.{name}:main" for name in SCRIPTS}


def test_a_pin_leaves_out_the_pythons_that_its_package_refuses():
    pins = [
        Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    found = {canonicalize_name(each.metadata["Name"]): each for each in importlib.metadata.distributions()}
    refused = [
        f"{pin} on {version}, needs Python {needed}"
        for pin in pins
        if (package := found.get(canonicalize_name(pin.name))) and package.version in pin.specifier
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
engine = Engine(load_model("outputs/quickstart/retrofit/final"))
(answer,) = engine.generate([list(range(200))], SamplingParams(max_new_tokens=16, temperature=0.0))
print(Path(_built()._name).name if _built() else None, answer.token_ids)
"""


@pytest.mark.slow
def test_an_installed_wheel_runs_from_an_empty_folder(tmp_path):
    def run(*command, **variables):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "COLUMNS": "200", **variables}
        done = subprocess.run(command, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "WARNING" not in done.stderr, done.stderr  # of a library: nothing that a user would ask about
        return done.stdout

    (tmp_path / "empty").mkdir()
    source = tmp_path / "source"  # a build writes beside what it builds
    shutil.copytree(ROOT, source, ignore=lambda folder, names: {*names} - KEPT if Path(folder) == ROOT else set())
    offline = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    pip = (sys.executable, "-m", "pip")
    levels = ("AVX2", "AVX512") if platform.machine() == "x86_64" and shutil.which("c++") else ()
    wheel_of = (*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source))
    run(*wheel_of, DMC_CPU_KERNELS=str(int(bool(levels))), CXX="env c++")
    (wheel,) = tmp_path.glob("*-py3-none-*.whl")
    assert ("linux_x86_64" in wheel.name) == bool(levels)
    run(*pip, "install", *offline, "--target", str(tmp_path / "site"), str(wheel))
    shutil.rmtree(source)
    installed = tmp_path / "site" / "dmc"
    for folder in ("configs", "scripts"):
        kept = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.*") if path.suffix in KINDS}
        assert {path.relative_to(installed / folder) for path in (installed / folder).rglob("*.*")} >= kept
    for kernels in (installed / "kernels").glob("*.so"):
        needed = re.findall(rb"GLIBC_(\d+)\.(\d+)", kernels.read_bytes())
        assert max((int(major), int(minor)) for major, minor in needed) <= (2, 28)  # that of torch's own wheels
    binaries = tmp_path / "site" / "bin"
    assert {path.name for path in binaries.iterdir()} >= {"dmc-train", "dmc-compare", "dmc-export"}
    modules = [f"dmc.scripts.{name}" for name in SCRIPTS]
    code = f"import importlib; print(*[importlib.import_module(each).main.__name__ for each in {modules}])"
    assert run(sys.executable, "-c", code).split() == ["main"] * len(modules)
    shown = run(str(binaries / "dmc-train"), "--help")
    assert "training: pretrain, regress, retrofit" in shown and "callbacks: device_stats, profile" in shown
    plan = run(str(binaries / "dmc-train"), "experiment=quickstart_base", "plan=true")
    assert re.search(r"pretrain +2,400 steps", plan)
    assert "h2o" in run(str(binaries / "dmc-compare"), "models={base: nowhere}", "policies=full,h2o", "--cfg", "job")
    assert not [*(tmp_path / "empty").iterdir()]

    assert run(str(binaries / "dmc-demo")).count("of 6 answered") == 4

    # The main job, shortened, with the kernels that came along: here is no compiler.
    alone = {"CXX": "/nowhere", "XDG_CACHE_HOME": str(tmp_path / "cache")} if levels else {}
    shown = run(str(binaries / "dmc-quickstart"), "--base", *BASE, "--retrofit", *RETROFIT, **alone)
    assert (tmp_path / "empty/outputs/quickstart/table.md").read_text().strip() in shown
    answers = [run(sys.executable, "-c", ANSWER, ATEN_CPU_CAPABILITY=each.lower(), **alone) for each in levels]
    best = torch.backends.cpu.get_cpu_capability()
    for level, answer in zip(levels, answers, strict=True):
        used = level if best in levels[levels.index(level) :] else best
        assert answer.split(maxsplit=1) == [f"cpu_{used.lower()}.so", answers[0].split(maxsplit=1)[1]]
