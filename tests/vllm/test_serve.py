"""`vllm serve`, as docs/vllm.md has it: its OpenAI API answers with the tokens of `Engine`, to several at once."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm.entrypoints.openai.api_server", reason="vLLM is not installed here")

from conftest import TEXT_VOCAB_SIZE, build_stock, mixed_gates, open_adapters
from transformers import AutoTokenizer

from dmc import Engine, SamplingParams, load_model, retrofit
from dmc.data import train_tokenizer

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
(COMMAND,) = re.findall(r"^vllm serve .*", (ROOT / "docs" / "vllm.md").read_text(), re.MULTILINE)
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))),
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
}
"""Of vLLM's CPU platform, on a machine with few cores."""
CHAT_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
MESSAGES = [{"role": "system", "content": "line 7 of <b>"}, {"role": "user", "content": "line 8, then xxx é"}]
NUM_NEW = 48


def ask(url, path, **body):
    """Return what a request is answered with; a list of chunks if it is streamed."""
    given = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_NEW, "return_token_ids": True, **body}
    request = urllib.request.Request(
        url + path, json.dumps({"model": "exported/cr4", **given}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        if not body.get("stream"):
            return json.load(response)
        lines = [line.decode().removeprefix("data: ").strip() for line in response]
        assert lines.pop() == "" and lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines if line]


def choices(answer):
    return [choice for chunk in (answer if isinstance(answer, list) else [answer]) for choice in chunk["choices"]]


def tokens_of(answer):
    return [token for choice in choices(answer) for token in choice.get("token_ids") or ()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the command runs: below it is an exported folder with a tokenizer."""
    place = tmp_path_factory.mktemp("serve")
    text = "".join(f"line {i} <b>é\u00a0& {'x' * (i % 7)}</b>\n" for i in range(60))
    tokenizer = train_tokenizer([text], TEXT_VOCAB_SIZE, place / "tokenizer")
    tokenizer.chat_template = CHAT_TEMPLATE
    model = open_adapters(retrofit(build_stock(vocab_size=TEXT_VOCAB_SIZE), mixed_gates(delay=3)))
    for part in (model, tokenizer):
        part.save_pretrained(place / "exported" / "cr4")
    return place


@pytest.fixture(scope="module")
def server(folder):
    """Its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"--host 127.0.0.1 --port {port} --dtype float32 --worker-cls cpu_vllm.Worker"
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            shlex.split(f"{COMMAND} {options}"), cwd=folder, env=os.environ | SETTINGS, stdout=output, stderr=output
        )
    try:
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def test_answers_have_the_engines_tokens_streamed_or_not_several_at_once(folder, server, make_prompts):
    tokenizer = AutoTokenizer.from_pretrained(folder / "exported" / "cr4")
    chat = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    prompts = [*make_prompts(5, 130, 33, 1, 70, 300), tokenizer(chat).input_ids]
    sampling = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0)
    expected = [done.token_ids for done in Engine(load_model(folder / "exported" / "cr4")).generate(prompts, sampling)]
    asked = [("/v1/completions", {"prompt": prompt}) for prompt in prompts[:-1]]
    asked.append(("/v1/chat/completions", {"messages": MESSAGES}))
    calls = [(path, {**body, "stream": stream}) for stream in (False, True) for path, body in asked]
    with ThreadPoolExecutor(len(calls)) as pool:
        answers = [*pool.map(lambda call: ask(server, call[0], **call[1]), calls)]
    for (_, body), answer, wanted in zip(calls, answers, 2 * expected, strict=True):
        assert tokens_of(answer) == wanted, body
    assert all(len(choices(answer)) > 1 for answer in answers[len(asked) :])  # chunks
    with urllib.request.urlopen(f"{server}/metrics") as metrics:
        assert 'block_size="128"' in metrics.read().decode()  # the CPU platform's default: eight pages of a head


@torch.no_grad()
def test_beams_are_those_of_the_models_probabilities(folder, server, make_prompts):
    """vLLM's frontend makes each token of each beam a request of its own, whose prompt is computed again."""
    model, (prompt,), width = load_model(folder / "exported" / "cr4"), make_prompts(40), 3
    beams = [(0.0, prompt)]
    for _ in range(6):
        candidates = []
        for total, tokens in beams:
            logprobs = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1)
            candidates += [(total + float(logprobs[token]), [*tokens, token]) for token in range(TEXT_VOCAB_SIZE)]
        beams = sorted(candidates, reverse=True)[:width]
    found = ask(server, "/v1/completions", prompt=prompt, use_beam_search=True, n=width, max_tokens=6)
    assert [choice["token_ids"] for choice in choices(found)] == [tokens[len(prompt) :] for _, tokens in beams]
