"""The audit's own command: what it measures of tiny models, and what makes it fail."""

import json

import pytest
from composing import CONFIGS
from scripts_here import run_script

from dmc import load_model, retrofit
from dmc.commands.audit import idle_cells, protected
from dmc.compression import CompressionConfig
from dmc.models.loading import load_tokenizer
from dmc.results import compare

CHAT = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<a>"
TRUE = "h2o within 9 nats of full at loss"


@pytest.fixture
def audit(folders, tmp_path, monkeypatch):
    """Return a function that runs the audit of the tiny stock model with other settings, and what it exits with."""
    monkeypatch.chdir(tmp_path)
    text = folders.text.read_text()
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"{i} {text}"}) + "\n" for i in range(6)))
    source = {"_target_": "dmc.data.TextSource", "name": str(tmp_path / "texts.jsonl")}
    shared = {"cache_folder": "cache", "num_samples": 6, "context_tokens": 32, "scored_tokens": 16}
    loss = {"name": "loss", "like": "text_loss", "source": source, **shared}

    def run(claim="null", models=None, **changes):
        values = {"models": {"base": str(folders.stock)} | (models or {}), "policies": ["full", "h2o"], "budgets": [4]}
        values |= {"claim": None, "tasks": ["LOSS"], "output": "audit", "chat_tasks": ["system_prompt"], **changes}
        values["tasks"] = [loss if task == "LOSS" else task for task in values["tasks"]]
        (tmp_path / "audit.yaml").write_text(json.dumps(values))
        return run_script("audit.py", f"--config-path={tmp_path}", "--config-name=audit", f"claim={claim}")

    return run


def test_a_true_claim_passes_with_protected_forms_counters_and_a_page(audit, tmp_path, capsys):
    speed = {"prompt_length": 32, "new_tokens": 4, "batch_size": 2, "rounds": 2}
    assert audit(TRUE, speed=speed) == ""
    shown = capsys.readouterr().out
    assert f"true: {TRUE}: " in shown and "| engine: base, h2o at CR 4 | 32 | 2 |" in shown
    assert "| base, h2o+protect=0.1 | CR 4 | loss |" in shown and "| base, full | full cache | loss |" in shown
    assert "left out: conversations: base has no chat template" in shown and "left out: reasoning" in shown
    assert f"true: {TRUE}" in (tmp_path / "audit/report/report.html").read_text()
    said = (tmp_path / "audit/audit.md").read_text()
    rows = {row["policy"]: row for row in map(json.loads, (tmp_path / "audit/cells.jsonl").read_text().splitlines())}
    seen, held = (rows["h2o"][f"entries_{name}"] for name in ("seen", "held"))
    assert seen == 6 * 47 * 2 * 2 and held < seen / 3.5 and f"| {seen:,} | {seen - held:,} | 0 |" in said
    assert f"| {rows['h2o']['mean_achieved_ratio']:.2f} | {seen / held:.2f} |" in said
    assert f"; h2o held CR {max(seen / held, rows['h2o']['mean_achieved_ratio']):.2f} of 4 claimed." in said


def test_speed_is_that_of_the_audited_cache(audit, tmp_path):
    speed = {"prompt_length": 128, "new_tokens": 4, "batch_size": 1, "rounds": 2}
    for dtype in ("auto", "int8"):
        engine = {"kv_cache_dtype": dtype}
        assert audit(policies=["full"], budgets=[], speed=speed, engine=engine, output=f"audit-{dtype}") == ""
    texts = [(tmp_path / f"audit-{dtype}/cells.jsonl").read_text() for dtype in ("auto", "int8")]
    full, small = (json.loads(text.splitlines()[-1]) for text in texts)
    assert small["task"] == "speed" and small["settings"]["task"]["kv_cache_dtype"] == "int8"
    assert small["peak_bytes_allocated"] < 0.4 * full["peak_bytes_allocated"]  # 16 + 4 bytes of 16 * 4


def test_a_claim_about_a_cache_that_lost_a_single_entry_fails(audit, tmp_path, monkeypatch, capsys):
    """What removed anything at all has acted, but has not compressed."""
    of_engine = compare.memory_of

    def one_removed(stats, budget=None):
        found = of_engine(stats, budget)
        if budget is None:
            return found
        held = found["entries_seen"] - 1
        ratio = found["entries_seen"] / held
        return found | {"entries_held": held, "achieved_ratio": ratio, "mean_achieved_ratio": ratio}

    monkeypatch.setattr(compare, "memory_of", one_removed)
    failed = f"not compressed: {TRUE}; h2o held CR 1.00 of 4 claimed; at least 90% of a CR must be held."
    assert audit(TRUE, protect=None) == f"error: the audit failed:\n  {failed}"
    assert "| 1 | 0 | 1.00 | 1.00 ↓ |" in capsys.readouterr().out


def test_every_reason_to_fail_is_said(audit, folders, tmp_path, capsys):
    gates = CompressionConfig(decision_offset=1000.0, target_ratio=2.0)  # it never merges
    retrofit(load_model(folders.stock), gates).save_pretrained(tmp_path / "closed")
    load_tokenizer(folders.stock).save_pretrained(tmp_path / "closed")
    claims = ["h2o better than full at loss", "full better than h2o at loss", "h2o within 3 points of full at needle"]
    needle = {"name": "needle", "like": "needle", "lengths": [9]}  # no room for its question
    changes = {"policies": ["full", {"name": "h2o", "like": "h2o"}], "tasks": ["LOSS", needle], "protect": None}
    said = audit(
        f"[{','.join(claims)}]", {"closed": {"path": str(tmp_path / "closed"), "policies": ["full"]}}, **changes
    )
    first, *lines = said.splitlines()
    assert first == "error: the audit failed:"
    assert any(line.startswith("  base/full/needle/seed0: ValueError") for line in lines)
    idle = (
        "nothing was compressed: closed/full/loss/seed0: CR 2 was asked for, and all 1,128 entries were held and read"
    )
    assert f"  {idle}" in lines and not any("base/full/loss" in line for line in lines)
    judged = capsys.readouterr().out.split("### Claims\n\n")[1].split("\n\n")[:3]
    standings = [text.split(":")[0] for text in judged]
    assert standings[2] == "not measured" and {*standings[:2]} in ({"true", "false"}, {"not carried"})
    assert all((f"  {text}" in lines) == (standing != "true") for text, standing in zip(judged, standings, strict=True))


@pytest.mark.parametrize(
    ("claim", "error"),
    [
        ("h2o is fine", "expected 'METHOD within NUMBER points of METHOD at TASK'"),
        ("tova within 3 nats of full at loss", "'tova' is no method of this audit"),
        ("h2o within 3 nats of full at needle", "'needle' is no task of this audit"),
        ("h2o within 3 points of full at loss", "loss is not measured in points"),
    ],
)
def test_a_claim_that_names_nothing_ends_it_in_one_line(audit, tmp_path, claim, error):
    said = audit(claim)
    assert said.startswith("error: ") and error in said and "\n" not in said and not (tmp_path / "audit").exists()


def test_chats_with_a_system_prompt_are_asked_in_conversations(audit, folders, tmp_path, capsys):
    tokenizer = load_tokenizer(folders.stock)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folders.stock)
    chat = {"name": "system", "like": "system_prompt", "haystack": "line.\n", "length": 900, "codes": 1, "contexts": 2}
    assert audit(chat_tasks=[chat | {"max_new_tokens": 2}], policies=["full", "snapkv"], protect=None) == ""
    shown = capsys.readouterr().out
    assert "### system: obeyed of 2 samples" in shown and "| base, snapkv | CR 4 | system |" in shown
    page = (tmp_path / "audit/report/report.html").read_text()
    assert "<h2>What is left of each instruction</h2>" in page and "snapkv at CR 4: mean 0." in page
    assert "Horizontal: heads, layer after layer. Vertical: instruction." in page


def test_a_protected_form_that_was_given_is_not_given_twice():
    given = ["full", "h2o", "h2o+protect=0.1", {"name": "mine", "like": "tova"}]
    named = {"name": "mine+protect=0.1", "like": "tova", "protect": 0.1}
    assert protected(given, 0.1, CONFIGS) == [named]
    assert protected(["h2o"], 0.1, CONFIGS) == ["h2o+protect=0.1"]


def test_what_a_policy_leaves_unread_counts_and_what_nobody_counted_fails():
    row = {"status": "done", "key": "quest/4", "learned": False, "budget": "4", "requested_ratio": 4.0}
    counted = row | {"entries_seen": 1000, "entries_held": 1000, "entries_unread": 30}
    assert idle_cells([counted]) == idle_cells([counted | {"entries_unread": 0, "requested_ratio": 1.0}]) == []
    assert "all 1,000 entries" in idle_cells([counted | {"entries_unread": 0}])[0]
    assert "give overwrite=true" in idle_cells([row])[0]
