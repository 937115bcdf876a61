import json
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from documents import commands, examples
from scripts_here import run_script
from short_quickstart import BASE, RETROFIT

from dmc import load_model
from dmc.data import StandardLibrarySource, build_packed
from dmc.loading import load_tokenizer
from dmc.measure import score_text
from dmc.results.statistics import summarize
from dmc.results.store import Store
from dmc.results.tasks import FactRecall
from dmc.training.record import read_config
from dmc.training.text_data import TextData

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_main_job_runs_small_and_a_second_run_reuses_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.syspath_prepend(tmp_path)
    assert not run_script("train.py", "experiment=quickstart_base", *BASE)
    assert not run_script("quickstart.py", "--base", *BASE, "--retrofit", *RETROFIT)
    shown = capsys.readouterr().out
    folder = tmp_path / "outputs/quickstart"
    frame = Store(folder / "cells.jsonl").frame()
    recall, loss = (
        summarize(frame[frame["task"] == f"stdlib {name}"]).set_index("title") for name in ("recall", "loss")
    )
    rivals = [f"control, {name}, bytes of retrofit" for name in ("h2o", "tova", "snapkv")]
    for lines in (recall, loss):
        assert {*lines.index} == {"base, full", "control, full", "retrofit, learned, CR 4", *rivals}
        assert {*lines["split"]} == {"test"} and lines.loc["control, full", "achieved_ratio"] == 1
        own = lines.loc["retrofit, learned, CR 4", "bytes_per_token"]
        assert own < lines.loc["control, full", "bytes_per_token"]
        assert lines.loc[rivals, "bytes_per_token"].between(own / 1.02, own * 1.15).all()
    assert {*recall["question"]} == {"hidden"} and {*recall["samples"]} == {16 * 2} and {*loss["samples"]} == {8}
    tokenizer, control = load_tokenizer(folder / "base/final"), load_model(folder / "control/final")
    source, cache = StandardLibrarySource("test"), str(tmp_path / "outputs/quickstart/cache")
    windows = build_packed(source, tokenizer, 64, cache)
    texts = torch.stack([windows[round(i * (len(windows) - 1) / 7)]["input_ids"] for i in range(8)])
    options = {"keys": 2, "num_keys": 5, "lengths": [64], "questions": 2, "cache_folder": cache}
    asked = FactRecall(haystack=source, **options).samples(tokenizer, len(tokenizer))
    with torch.no_grad():
        logits = control(texts).logits[:, 47:-1].transpose(1, 2)
        answers = [int(control(torch.tensor([each.prompt + each.after])).logits[0, -1].argmax()) for each in asked]
    assert loss.loc["control, full", "value"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, texts[:, 48:])), abs=1e-5
    )
    right = [answer == each.continuation[0] for answer, each in zip(answers, asked, strict=True)]
    assert recall.loc["control, full", "value"] == pytest.approx(sum(right) / len(right))
    assert (folder / "table.md").read_text().strip() in shown and "outputs/quickstart/report/report.html" in shown
    assert "retrofit (learned)" in (folder / "report/report.html").read_text()
    assert set(json.loads((folder / "seconds.json").read_text())) == {"base", "control", "retrofit", "measure"}
    data = TextData(read_config(folder / "retrofit"), tokenizer, total_steps=1)
    contexts, measured = data.held_out("calibration", has_questions=False), folder / "retrofit/final/retrofit.json"
    assert json.loads(measured.read_text())["metrics"]["achieved_ratio_on_calibration_text"] == pytest.approx(
        score_text(load_model(folder / "retrofit/final"), contexts).achieved_ratio, rel=1e-5
    )
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("model.safetensors")}
    assert not run_script("quickstart.py", "--base", *BASE, "--retrofit", *RETROFIT)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("model.safetensors")} == stamps

    files = [file for file, _ in examples()]
    for file, code in examples():
        (tmp_path / file).write_text(code)
        runpy.run_path(file, run_name="__main__")
    extensions = {Path(file).stem for file in files if not file.startswith("example_")}
    assert {"key_norm", "first_token", "numbers_source"} <= extensions
    for words in map(shlex.split, commands()):
        named = any(f"{name}." in word for name in extensions for word in words)
        if words[0] == "python" and (named or "output_dir=outputs/local_prior" in words):
            assert not run_script(Path(words[1]).name, *words[2:])
    assert "key_norm" in (tmp_path / "outputs/compare/table.md").read_text()

    capsys.readouterr()
    model = "model=outputs/quickstart/retrofit/final"
    assert not run_script("generate.py", model, "prompt=import os", "max_new_tokens=8")
    assert capsys.readouterr().out.startswith("import os")
    assert not run_script("export.py", "run=outputs/quickstart/retrofit", "output=exported")
    assert "is not empty" in run_script("export.py", "run=outputs/quickstart/retrofit", "output=exported")
