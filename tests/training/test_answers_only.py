"""Runs on chats, on prompts with completions, and on indexed tokens learn what they should, cached and streaming."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from dmc.config import build_config
from dmc.data import train_tokenizer
from dmc.training.config import RunConfig
from dmc.training.optimizer_step import OptimizerStep
from dmc.training.run import train
from dmc.training.text_data import TextData

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


@pytest.fixture
def values(run_values, tmp_path, only_trained):
    """Settings of a short run with the tokenizer of an instruct model, and its text in three forms."""
    train_tokenizer([f"question {i} <user> <assistant> answer {i}" for i in range(50)], 280, tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    pairs = [(f"question {i} ", f"answer {i} is so and so") for i in range(60)]
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps({"prompt": q, "completion": a}) for q, a in pairs))
    lengths = [5 + number % 9 for number in range(60)]
    np.random.default_rng(0).integers(1, 280, sum(lengths)).astype(np.uint16).tofile(tmp_path / "indexed.bin")
    index = b"MMIDIDX\x00\x00" + np.int64(1).tobytes() + b"\x08" + np.array([60, 61]).astype(np.int64).tobytes()
    index += (
        np.array(lengths, dtype=np.int32).tobytes() + (2 * np.cumsum([0, *lengths[:-1]])).astype(np.int64).tobytes()
    )
    (tmp_path / "indexed.idx").write_bytes(index + np.arange(61, dtype=np.int64).tobytes())
    run_values["base"]["shape"] |= {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    run_values["training"] |= {
        "stages": {"retrofit": {"length": "2 steps"}}, "batch_size": 4, "micro_batch_size": 2, "sequence_length": 32,
        "validate_every_steps": 100, "document_masking": True,
    }  # fmt: skip
    run_values["data"]["tokenizer"] = {"path": str(tmp_path / "tokenizer")}
    return run_values


@pytest.fixture
def batches(monkeypatch):
    """What the training steps were given."""
    plain, seen = OptimizerStep.run, []

    def run(self, module, micro_batches):
        seen.extend(micro_batches)
        return plain(self, module, micro_batches)

    monkeypatch.setattr(OptimizerStep, "run", run)
    return seen


@pytest.mark.parametrize(
    ("name", "columns", "streaming"),
    [("chats", {"messages": "messages"}, True), ("pairs", {"prompt": "prompt", "completion": "completion"}, False)],
    ids=["chats, streaming", "pairs, cached"],
)
def test_run_learns_the_answers_alone_and_is_measured_on_them(values, batches, tmp_path, name, columns, streaming):
    source = {"own": {"_target_": "dmc.data.TextSource", "name": str(tmp_path / f"{name}.jsonl"), **columns}}
    values["data"] |= {
        "train": source,
        "validation": source,
        "test": source,
        "streaming": streaming,
        "stream_shards": 2,
    }
    config = build_config(RunConfig, values)
    train(config)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert len(batches) == 4
    data = TextData(config, tokenizer, total_steps=1)
    held_out = [
        data.held_out("validation"),
        data.held_out("calibration"),
        data.held_out("test"),
    ]
    for batch in (*batches, *(batch for split in held_out for batch in split)):
        learned = tokenizer.decode(batch["input_ids"][batch["loss_mask"]])
        assert "answer" in learned and "question" not in learned and not batch["loss_mask"].all()
        ends = batch["input_ids"][:, :-1] == tokenizer.eos_token_id
        assert torch.equal(batch["documents"].starts[:, 1:], ends) and batch["documents"].starts[:, 0].all()


def test_run_resets_where_the_index_ends_documents(values, batches, tmp_path):
    values["data"]["train"] = {"own": {"_target_": "dmc.data.MegatronSource", "prefix": str(tmp_path / "indexed")}}
    train(build_config(RunConfig, values))
    tokens = np.fromfile(tmp_path / "indexed.bin", dtype=np.uint16)
    bounds = set(np.cumsum([0, *(5 + number % 9 for number in range(60))]).tolist())
    for batch in batches:
        assert "loss_mask" not in batch and "document_starts" not in batch
        for row, starts in zip(batch["input_ids"], batch["documents"].starts, strict=True):
            (begin,) = (i for i in range(0, len(tokens) - 31, 32) if (tokens[i : i + 32] == row.numpy()).all())
            assert starts.tolist() == [place == 0 or begin + place in bounds for place in range(32)]


def test_lessons_are_learned_as_short_sequences_and_answers_more_than_the_rest(values, batches, tmp_path):
    train_tokenizer([" house river question answer" * 9], 300, tmp_path / "wordy")
    lessons = [
        {"kind": "copies", "length": 16, "sequences": 4},
        {"kind": "facts", "length": 32, "sequences": 4, "keys": 1},
    ]
    values["compression"] = None
    values["training"] |= {
        "stages": {"pretrain": {"length": "3 steps"}},
        "sequence_length": 64,
        "document_masking": False,
    }
    values["data"] |= {
        "facts": {"keys": 2, "num_keys": 2, "lessons": lessons},
        "tokenizer": {"path": str(tmp_path / "wordy")},
    }
    values["data"]["train"]["text"]["name"] = values["data"]["validation"]["text"]["name"]
    config = build_config(RunConfig, values)
    train(config)
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(8, 16)] * 2 + [(4, 32)] * 2 + [(2, 64)] * 2
    assert [batch["position"] for batch in batches[:2]] == [[*range(8)], [*range(8, 16)]]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "wordy")
    for batch in TextData(config, tokenizer, total_steps=1).held_out("validation"):
        assert batch["input_ids"].shape == (2, 64) and batch["loss_mask"].unique().tolist() == [1.0, 9.0]
    assert sum(int((batch["loss_mask"] == 9).sum()) for batch in batches) == 4 * 2 * 1 + 4 * 2
    lessons[0]["sequences"] = 6
    with pytest.raises(ValueError, match="lessons of 6 sequences end within a step of 4"):
        build_config(RunConfig, values)
    values["data"]["streaming"] = True
    with pytest.raises(ValueError, match=r"data\.facts are written into cached text"):
        build_config(RunConfig, values)


def chats_with_answers(tmp_path, prompt_words, count=40):
    pairs = [{"prompt": "question " * prompt_words, "completion": f"answer {i}"} for i in range(count)]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    source = {"_target_": "dmc.data.TextSource", "name": str(tmp_path / "long.jsonl")}
    return {"own": source | {"prompt": "prompt", "completion": "completion"}}


@pytest.mark.parametrize("split", ["train", "validation"])
def test_answers_that_all_lie_behind_the_cut_are_refused_before_the_first_step(split, values, tmp_path):
    values["training"]["whole_documents"] = True
    values["data"][split] = chats_with_answers(tmp_path, prompt_words=60)
    data = TextData(build_config(RunConfig, values), AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), 1)
    expected = (
        r"data\.{}: none of the 40 documents of .*long\.jsonl has a token of an answer within the first 32 tokens"
    )
    with pytest.raises(ValueError, match=expected.format(split)):
        data.setup("fit")


@pytest.mark.parametrize(("prompt_words", "level"), [(3, "INFO"), (900, "WARNING")])
def test_share_of_tokens_that_are_learned_is_said(prompt_words, level, values, tmp_path, caplog):
    values["data"]["train"] = chats_with_answers(tmp_path, prompt_words)
    data = TextData(build_config(RunConfig, values), AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), 1)
    with caplog.at_level("INFO"):
        data.setup("fit")
    (record,) = (record for record in caplog.records if record.message.startswith("data.train"))
    assert record.levelname == level
    items = [data._train.dataset[index] for index in range(len(data._train.dataset))]
    learned = sum(int(item["loss_mask"].sum()) for item in items)
    share = 100 * learned / (32 * len(items))
    assert f"{share:.2g} % of {32 * len(items):,} tokens" in record.message


@pytest.mark.parametrize("whole_documents", [False, True])
def test_tokens_behind_the_end_of_a_sequence_are_told(whole_documents, values, tmp_path, caplog):
    values["training"]["whole_documents"] = whole_documents
    pairs = [{"prompt": "question", "completion": f" answer {i}" * (1 + 20 * (i % 2))} for i in range(10)]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    source = {"_target_": "dmc.data.TextSource", "name": str(tmp_path / "long.jsonl")}
    values["data"]["train"] = {"own": source | {"prompt": "prompt", "completion": "completion"}}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    data = TextData(build_config(RunConfig, values), tokenizer, 1)
    data.setup("fit")
    lengths = [1 + len(tokenizer(pair["prompt"] + pair["completion"])["input_ids"]) for pair in pairs]
    cut = sum(max(length - 32, 0) for length in lengths)
    said = [record.message for record in caplog.records if "are not read" in record.message]
    told = [message for message in said if message.startswith("data.train")]
    assert cut and len(told) == whole_documents
    assert all(f"{100 * cut / sum(lengths):.2g} % of {sum(lengths):,} tokens" in message for message in told)
