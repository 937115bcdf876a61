"""The check of a GPU, on a machine without one: its parts on little, and parts and figures that fail or hang."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_check  # noqa: E402
import parity  # noqa: E402
from gpu_check import PARTS  # noqa: E402
from gpu_parts import attention, checks, profiling, runs  # noqa: E402
from gpu_parts.place import Figure, Place, row  # noqa: E402
from parity import GATES, SETTINGS  # noqa: E402

import dmc_cli.gpu_check  # noqa: E402

WRITES = "import sys, json, pathlib; open(sys.argv[-1], 'a').write(json.dumps({'part': pathlib.Path(sys.argv[-1]).stem, 'measured': 'a', 'value': 2.0, 'unit': 's', 'beside': '', 'holds': True}) + chr(10)); "  # noqa: E501


def run(program, folder, name="loss", seconds=20):
    gpu_check.run_part(name, [sys.executable, "-c", program], folder, seconds)


def lines(folder, part):
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]


def on_little(folder, *parts, environment=None):
    command = [sys.executable, gpu_check.__file__, "--device", "cpu", "--tiny", "--output", str(folder)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | (environment or {})
    run = subprocess.run(
        [*command, "--part", *parts], env=environment, check=False, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return {part: lines(folder, part) for part in parts}


def test_a_part_that_fails_and_one_that_hangs_keep_their_figures(tmp_path):
    child = "import subprocess; subprocess.run(['sleep', '60'])"
    run(WRITES + "raise SystemExit('it broke')", tmp_path, "attention")
    run(WRITES + child, tmp_path, "loss", seconds=2)
    run(WRITES, tmp_path, "step")
    rows = gpu_check.write_tables(tmp_path)
    ended = [("attention", False), ("loss", False), ("step", True)]
    assert [(row["part"], row["holds"]) for row in rows[1::2]] == ended
    assert all(row["measured"] == "a" for row in rows[::2])
    assert "exit code 1: it broke" in rows[1]["beside"] and "ended after 2 s" in rows[3]["beside"]
    assert "it broke" in (tmp_path / "attention.log").read_text()
    assert json.loads((tmp_path / "gpu_check.json").read_text())["rows"] == rows
    assert "**no**" in (tmp_path / "gpu_check.md").read_text()


def test_a_part_that_dies_on_a_gpu_runs_again_with_blocking_launches(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    run("import os, sys; print('blocking:', os.environ.get('CUDA_LAUNCH_BLOCKING')); sys.exit(9)", tmp_path, seconds=60)
    (last,) = lines(tmp_path, "loss")
    assert not last["holds"] and "loss.blocking.log" in last["beside"]
    assert "blocking: None" in (tmp_path / "loss.log").read_text()
    assert "blocking: 1" in (tmp_path / "loss.blocking.log").read_text()


def test_a_figure_that_fails_is_written_and_the_next_is_measured(tmp_path, monkeypatch):
    def fails():
        yield row("before", 1.0, "s")
        raise RuntimeError("out of\nmemory")

    chosen = [Figure("first", fails), Figure("second", lambda: [row("after", 2.0, "s", holds=True)])]
    monkeypatch.setattr(attention, "figures", lambda place: iter(chosen))
    assert gpu_check.measure("attention", Place("cpu", True), tmp_path / "attention.jsonl") == gpu_check.SOME_FAILED
    start, *rows = lines(tmp_path, "attention")
    assert start["hardware"]["cpu_cores"] and start["provenance"]["versions"]["torch"]
    assert [(found["measured"], found["value"]) for found in rows] == [("before", 1.0), ("first", None), ("after", 2.0)]
    assert rows[1]["beside"] == "RuntimeError: out of memory" and rows[1]["holds"] is False
    assert "| first | failed | RuntimeError" in gpu_check.table_of(gpu_check.read_rows(tmp_path))


def test_a_missing_package_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gpu_parts.loss", None)
    assert gpu_check.measure("loss", Place("cpu", True), tmp_path / "loss.jsonl") == gpu_check.SOME_FAILED
    assert "ModuleNotFoundError" in lines(tmp_path, "loss")[-1]["beside"]


def test_time_runs_out_between_parts(tmp_path, monkeypatch, capsys):
    given = []
    monkeypatch.setattr(gpu_check, "run_part", lambda name, command, folder, seconds: given.append((name, seconds)))
    gpu_check.main(["--device", "cpu", "--minutes", "2", "--output", str(tmp_path)])
    assert next(iter(given))[0] == "attention" and given[0][1] == pytest.approx(120, abs=5)
    gpu_check.main(["--device", "cpu", "--minutes", "0.1", "--output", str(tmp_path)])
    assert len(given) == len(PARTS) and capsys.readouterr().out.count("no time is left for it") == len(PARTS)


def test_without_a_gpu_it_says_what_it_would_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_check.main(["--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert all(f"| {name} | " in printed for name in PARTS) and not (tmp_path / "out").exists()
    assert max(part.seconds for part in PARTS.values()) <= 540
    assert list(PARTS)[:4] == ["attention", "loss", "step", "train"]


@pytest.mark.parametrize("arguments", ["--minutes 0", "--part speed", "--model nowhere"])
def test_a_wrong_argument_is_one_line(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        gpu_check.main(arguments.split())
    assert stop.value.code == 2 and "error: " in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_the_command_of_a_wheel_without_benchmarks_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(dmc_cli.gpu_check, "BENCHMARKS", tmp_path / "benchmarks")
    with pytest.raises(SystemExit, match=r"error: .*benchmarks does not exist: .* of a checkout; clone"):
        dmc_cli.gpu_check.main([])


def test_gates_that_are_drawn_hold_a_quarter():
    gates = attention.draw_gates((4, 4, 4096), "cpu")
    held = gates["CR 4, thresholded"] == 0
    assert held.float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert (gates["CR 4"] > -14).float().mean().item() == pytest.approx(0.31, abs=0.03)


def test_a_profile_counts_kernels_and_the_time_one_runs():
    from types import SimpleNamespace as Event

    from torch.autograd import DeviceType

    def event(name, start, end, kind=DeviceType.CUDA):
        return Event(name=name, time_range=Event(start=start, end=end), device_type=kind, cpu_parent=None)

    events = [event("a", 0, 4), event("b", 2, 6), event("a", 8, 10), event("host", 0, 100, DeviceType.CPU)]
    found = profiling.summarize(events, "cuda", steps=1)
    assert found["launches"] == 3 and found["busy"] == pytest.approx(0.8)
    assert [kernel["name"] for kernel in found["top"]] == ["a", "b"] and found["top"][0]["share"] == pytest.approx(0.6)


def test_a_model_that_was_written_in_part_is_written_anew(tmp_path, monkeypatch):
    def is_ended(model, folder):
        (Path(folder) / "config.json").write_text("{}")
        raise KeyboardInterrupt

    place = Place("cpu", True, output=tmp_path)
    tiny = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 9}
    monkeypatch.setattr("omegaconf.OmegaConf.to_container", lambda _: {"shape": {**tiny, "num_attention_heads": 2}})
    with monkeypatch.context() as patched:
        patched.setattr("transformers.PreTrainedModel.save_pretrained", is_ended)
        with pytest.raises(KeyboardInterrupt):
            runs.random_folder(place, "smollm2_135m")
    folder = Path(runs.random_folder(place, "smollm2_135m"))
    assert (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists()
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 16


def test_a_run_that_is_asked_to_stop_ends_as_before_the_end_of_a_job(tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    program = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print('up', flush=True); time.sleep(60)"
    )
    (tmp_path / "scripts" / "train.py").write_text(program)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    assert runs.script("train", [], tmp_path / "log", 30, stop_after=3) == runs.STOPPED
    with pytest.raises(TimeoutError, match="ended for want of time"):
        runs.script("train", [], tmp_path / "log", 1)


@pytest.mark.parametrize("name", ["attention", "loss", pytest.param("decode", marks=pytest.mark.slow)])
def test_short_parts_run_on_little(name, tmp_path):
    place = Place("cpu", True, output=tmp_path)
    assert gpu_check.measure(name, place, tmp_path / f"{name}.jsonl") == 0
    _, *rows = lines(tmp_path, name)
    assert len(rows) >= 6 and not any(found["holds"] is False for found in rows)
    assert gpu_check.table_of(rows)


@pytest.mark.slow
def test_the_other_parts_run_on_little(tmp_path):
    found = on_little(tmp_path, "step", "train", "decode", "policies", "trainers", "tests")
    for rows in found.values():
        assert rows[-1]["measured"] == "this part" and not any(row.get("holds") is False for row in rows)
    steps = {row["measured"].split(": ")[-1] for row in found["step"][1:]}
    assert {"a step", "tokens", "launches of a step", "kernel 10"} <= steps
    for name in ("cr4", "cr8"):
        gates = tmp_path / "gates" / name / "dmc_gates.safetensors"
        assert gates.stat().st_size < 2**20
        assert [row for row in found["train"] if row.get("measured") == f"text: {name}, full"]
    assert [row for row in found["train"] if row.get("measured") == "text: base, h2o bytes:cr4"]


@pytest.mark.slow
def test_training_that_time_runs_out_for_is_exported_as_it_is(tmp_path, monkeypatch):
    from gpu_parts import train

    place = Place("cpu", True, output=tmp_path)
    settings = train._settings(place, str(runs.CONTROL), tmp_path / "train" / "run", 600.0)
    endless = [one.replace("length: 4 steps", "length: 4000 steps") for one in settings]
    monkeypatch.setattr(train, "_settings", lambda *_: endless)
    real = runs.script

    def stops_soon(name, settings, log, seconds, *, stop_after=None):
        return real(name, settings, log, 300, stop_after=None if stop_after is None else 45)

    monkeypatch.setattr(train, "script", stops_soon)
    rows = list(train._train(place, {}))
    assert rows[0]["measured"] == "stopped for want of time"
    assert (tmp_path / "gates" / "stopped" / "dmc_gates.safetensors").exists()


@pytest.mark.slow
def test_the_dry_form_reaches_every_triton_kernel_and_gives_the_reference(tmp_path):
    """Prompts in chunks beside decoding, then tokens one by one, by Triton's interpreter."""
    pytest.importorskip("triton", reason="triton is not installed")
    found = on_little(tmp_path, "parity", environment={"TRITON_INTERPRET": "1"})["parity"]
    found = {row["measured"]: row for row in found[1:]}
    assert not [name for name, row in found.items() if row["holds"] is False]
    reached = found["Triton kernels that ran, float32"]
    assert reached["holds"], reached["beside"]
    assert found["top_p, tokens of its definition"]["holds"]
    for name in ("full cache", *GATES, *SETTINGS):
        assert name.startswith("CUDA graphs") or found[f"triton, {name}, float32"]["holds"]


def test_the_part_for_vllm_says_in_one_line_that_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert gpu_check.measure("vllm", Place("cpu", True), tmp_path / "vllm.jsonl") == 0
    _, line = lines(tmp_path, "vllm")
    assert "not installed" in line["beside"] and "pip install -e '.[vllm]'" in line["beside"]
    assert line["holds"] is None and line["value"] is None


def test_a_part_whose_packages_are_not_there_says_in_one_line_which(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("hydra", "datasets") else name)
    assert gpu_check.measure("train", Place("cpu", True), tmp_path / "train.jsonl") == gpu_check.SOME_FAILED
    _, line = lines(tmp_path, "train")
    assert line["beside"].startswith("lacks hydra, datasets: pip install") and line["holds"] is False


def test_trainers_without_deepspeed_say_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    *others, last = checks.trainer_figures(Place("cuda", True))
    assert [figure.name for figure in others] == [
        "trainer=gpu", "trainer=gpu trainer.compile=true", "trainer=ddp", "trainer=fsdp2",
    ]  # fmt: skip
    (said,) = last.measure()
    assert "not run" in said["beside"] and said["holds"] is None


def test_a_trainer_that_hangs_leaves_its_log_and_time_for_others(tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text("import time; print('joins', flush=True); time.sleep(60)")
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(checks, "TRAINER_SECONDS", 2)
    with pytest.raises(TimeoutError, match=r"see trainers\.train\.log"):
        list(checks._check_trainer(Place("cpu", True, output=tmp_path), "ddp"))
    assert (tmp_path / "trainers.train.log").read_text() == "joins\n"


TESTS = """
import time
def test_first(): pass
def test_second(): assert False
def test_third(): time.sleep(SECONDS)
"""


class UntilTheSecond(Place):
    """Has time until the second test has ended."""

    @property
    def seconds_left(self):
        return 60 if "FAILED" not in (self.output / "tests.pytest.log").read_text() else 0


@pytest.mark.parametrize(
    "options", [["-p", "no:xdist"], pytest.param(["--numprocesses=1"], marks=pytest.mark.slow)], ids=["alone", "xdist"]
)
@pytest.mark.parametrize("hangs", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_pytest_yields_failures_as_they_come_and_what_passed_when_time_is_up(options, hangs, tmp_path):
    chosen = tmp_path / "test_it.py"
    chosen.write_text(TESTS.replace("SECONDS", "60" if hangs else "0"))
    place = UntilTheSecond("cpu", True, output=tmp_path) if hangs else Place("cpu", True, output=tmp_path)
    found = list(checks.run_tests(place, [*options, f"--rootdir={tmp_path}", "-c", os.devnull, str(chosen)]))
    assert [(row["measured"].split("::")[-1], row["value"], row["holds"]) for row in found] == [
        ("test_second", None, False), ("pytest -m gpu", 1 if hangs else 2, False),
    ]  # fmt: skip
    assert ("stopped for want of time" in found[-1]["beside"]) is hangs
    assert hangs or "1 failed, 2 passed" in found[-1]["beside"]


def test_a_way_of_serving_that_fails_stops_no_other(monkeypatch):
    given = iter([torch.zeros(1), RuntimeError("no kernel\nimage")])

    def fails_once(engine, prompts, continuations):
        if isinstance(result := next(given, torch.zeros(1)), Exception):
            raise result
        return result

    monkeypatch.setattr(parity, "decoded", fails_once)
    found = list(parity._of_dtype(Place("cpu", True), torch.float32))
    failed, *others = [row for row in found if row["holds"] is not None]
    assert failed["beside"] == "RuntimeError: no kernel image" and not failed["holds"]
    assert len(others) > 8 and all(row["holds"] for row in others)


def test_nothing_is_measured_on_a_gpu_that_has_failed(tmp_path, monkeypatch):
    chosen = [Figure(name, lambda: [row(name, 1.0, "s")]) for name in ("first", "second")]
    monkeypatch.setattr(attention, "figures", lambda place: iter(chosen))
    monkeypatch.setattr(gpu_check, "_has_device", lambda place: False)
    assert gpu_check.measure("attention", Place("cpu", True), tmp_path / "attention.jsonl") == gpu_check.LOST
    last = lines(tmp_path, "attention")[-1]
    assert last["measured"] == "the GPU" and "first" in last["beside"] and len(lines(tmp_path, "attention")) == 3


def test_a_second_run_keeps_the_first_ones_figures(tmp_path):
    run(WRITES, tmp_path)
    run("raise SystemExit('no GPU')", tmp_path)
    assert len(lines(tmp_path, "loss")) == 1 and len(lines(tmp_path, "loss.earlier")) == 2


def test_a_hang_names_the_figure_that_was_measured(tmp_path):
    run("import time; print('begins: error', flush=True); print('{}', flush=True); time.sleep(60)", tmp_path, seconds=2)
    assert lines(tmp_path, "loss")[-1]["beside"] == "ended after 2 s: in error"


def test_a_part_that_ends_leaves_no_process_behind(tmp_path):
    child = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid)"
    run(child, tmp_path)
    state = Path(f"/proc/{(tmp_path / 'loss.log').read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.slow
def test_at_the_end_of_a_job_the_part_is_ended_and_the_tables_are_written(tmp_path):
    command = [sys.executable, gpu_check.__file__, "--device", "cpu", "--part", "attention", "--output", str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "attention.log"
    while not (log.exists() and "begins" in log.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(20) == 128 + 15
    assert lines(tmp_path, "attention")[-1]["beside"] == "interrupted"
    assert "interrupted" in (tmp_path / "gpu_check.md").read_text()


@pytest.mark.slow
def test_it_runs_where_the_project_is_not_installed():
    packages = os.pathsep.join(path for path in sys.path if path.endswith("-packages"))
    command = [sys.executable, "-S", str(ROOT / "scripts" / "gpu_check.py"), "--list"]
    environment = os.environ | {"PYTHONPATH": packages}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT.parent)
    assert done.returncode == 0 and "| attention |" in done.stdout, done.stderr


def test_a_torch_without_cuda_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    gpu_check.main(["--output", str(tmp_path)])
    assert "is built without CUDA" in capsys.readouterr().out.splitlines()[0]
