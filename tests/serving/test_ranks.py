"""One server in front of several ranks, as torchrun starts them: their tokens are those of one process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripts_here import SCRIPTS
from transformers import AutoTokenizer

from dmc import Engine, SamplingParams, load_model


@pytest.mark.slow
def test_two_ranks_answer_as_one(folders: Any, tmp_path: Path) -> None:
    model, tokenizer = load_model(folders.compressed), AutoTokenizer.from_pretrained(folders.compressed)
    prompts = [f"line {index} <b>" for index in range(5)]
    expected = Engine(model, tokenizer).generate(prompts, SamplingParams(max_new_tokens=9, temperature=0))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(SCRIPTS / "serve.py"), f"model={folders.compressed}", "name=own", "port=0", "memory=20000000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    try:
        assert process.stderr is not None
        url = next(found[0] for line in process.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        with httpx.Client(base_url=url, timeout=120) as web:
            request = {"model": "own", "prompt": prompts, "max_tokens": 9, "temperature": 0}
            answer = web.post("/v1/completions", json=request).json()
            assert [choice["text"] for choice in answer["choices"]] == [generation.text for generation in expected]
            drawn = {**request, "prompt": "line", "temperature": 1.0, "n": 3}  # without a seed the ranks agree on one
            assert web.post("/v1/completions", json=drawn).json()["usage"]["completion_tokens"] == 27
            assert web.post("/v1/completions", json={**request, "prompt": ""}).status_code == 400
            with web.stream("POST", "/v1/completions", json={**request, "stream": True, "max_tokens": 300}) as stream:
                next(stream.iter_lines())  # and goes away
            again = web.post("/v1/completions", json=request).json()
            assert [choice["text"] for choice in again["choices"]] == [generation.text for generation in expected]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
