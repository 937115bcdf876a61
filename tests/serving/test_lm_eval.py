"""lm-eval's clients against the server: the numbers and the texts of our harness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.models.utils import handle_stop_sequences

from dmc import Engine
from dmc.results.harness import EngineLM

pytest.importorskip("tenacity", reason="lm-eval[api] is not installed")
PAIRS = [("line 3 <b>", "é & x"), ("line 3 <b>", "xx"), ("line 4 <b>é &", " xxxx</b>\nline"), ("l", "ine 5")]


@pytest.fixture(scope="module")
def tokenizer_folder(text_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    text_tokenizer.save_pretrained(folder)
    return folder


def local(served: Any, name: str, folder: Path, **options: Any) -> LocalCompletionsAPI:
    url = f"{served.url}/v1/completions"
    return LocalCompletionsAPI(
        base_url=url, model=name, tokenizer_backend="huggingface", tokenizer=str(folder), max_length=512, **options
    )


def ours(served: Any, name: str) -> EngineLM:
    engine = served.worker.engines[name]
    return EngineLM(Engine(engine.model, engine.tokenizer, engine.policy))


@pytest.mark.parametrize(
    ("name", "options"), [("full", {}), ("own", {"batch_size": 3}), ("own", {"num_concurrent": 4})], ids=str
)
def test_likelihoods_are_our_harness(served: Any, name: str, options: dict, tokenizer_folder: Path) -> None:
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
    found = local(served, name, tokenizer_folder, **options).loglikelihood(requests, disable_tqdm=True)
    expected = ours(served, name).loglikelihood(requests, disable_tqdm=True)
    assert [pair[0] for pair in found] == pytest.approx([pair[0] for pair in expected], abs=1e-4)
    assert [pair[1] for pair in found] == [pair[1] for pair in expected]


@pytest.mark.parametrize("name", ["full", "own", "h2o", "snapkv", "quest"])
def test_greedy_texts_are_our_harness(served: Any, name: str, tokenizer_folder: Path) -> None:
    """Under a policy our harness feeds a prompt's last token when the others have been compressed."""
    settings = {"until": ["\n\n"], "max_gen_toks": 10, "do_sample": False, "temperature": 0}
    texts = [prompt for prompt, _ in PAIRS[1:]]

    def ask(given: list[str], **more: Any) -> list[Instance]:
        return [Instance("generate_until", {}, (text, {**settings, **more}), index) for index, text in enumerate(given)]

    harness = ours(served, name)
    expected = harness.generate_until(ask(texts), disable_tqdm=True)
    model = local(served, name, tokenizer_folder)
    policy = harness.engine.policy is not None
    assert model.generate_until(ask(texts, question_tokens=int(policy)), disable_tqdm=True) == expected
    assert handle_stop_sequences(None, model.eos_string) == ["<|endoftext|>"]

    chat = LocalChatCompletion(base_url=f"{served.url}/v1/chat/completions", model=name, max_length=512)
    talks = [[{"role": "user", "content": text}] for text in texts]
    written = [chat.apply_chat_template(talk) for talk in talks]
    requests = [
        Instance("generate_until", {}, (text, {**settings, "question_tokens": int(policy)}), index)
        for index, text in enumerate(written)
    ]
    plain = harness.generate_until(ask([f"<user>{text}\n<assistant>" for text in texts]), disable_tqdm=True)
    assert chat.generate_until(requests, disable_tqdm=True) == plain
