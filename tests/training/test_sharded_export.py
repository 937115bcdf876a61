"""Ranks that hold parts of a model export it together: into any folder, and all of it or nothing."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from export_faults import fail_to_complete, fail_to_describe, fail_to_join, fill_disk, kill_while_writing, write_slowly
from launching import Ranks, train_ranks

from dmc.files import replacement
from dmc.models import load_model
from dmc.training.export import export_checkpoint


@pytest.fixture
def sharded(run_values):
    run_values["trainer"] |= {"devices": 2, "strategy": "fsdp2"}
    run_values["training"] |= {"stages": {"retrofit": {"length": "1 steps"}}, "calibrate": False}
    return run_values


def test_bfloat16_folders_of_any_name_are_the_same_from_parts_and_from_a_whole_model(sharded, tmp_path):
    sharded["training"] |= {"export_dtype": "bfloat16"}
    run = tmp_path / "[a]" / "what?" / "*"
    train_ranks(sharded | {"output_dir": str(run)}, 2, tmp_path / "log")
    assert load_model(run / "final").compression.target_ratio == 4
    assert json.loads((run / "final" / "config.json").read_text())["dtype"] == "bfloat16"
    parts = load_model(run / "final", dtype="auto").state_dict()
    again = load_model(export_checkpoint(run, tmp_path / "again"), dtype="auto").state_dict()
    exact = export_checkpoint(run, tmp_path / "exact", overrides={"export_dtype": "float32"})
    for name, value in load_model(exact, dtype="auto").state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(parts[name], value.bfloat16()) and torch.equal(again[name], parts[name]), name


FAULTS = (
    ("the disk of rank 1 is full", partial(fill_disk, on_rank=1), "File too large"),
    ("the disk of rank 0 is full", partial(fill_disk, on_rank=0), "File too large"),
    ("rank 0 cannot join the parts", fail_to_join, ""),
    ("rank 0 cannot complete the folder", fail_to_complete, "these settings are refused"),
    ("rank 0 cannot describe the folder", fail_to_describe, "these settings are refused"),
    ("rank 1 is killed", partial(kill_while_writing, on_rank=1), ""),
    ("rank 0 is killed", partial(kill_while_writing, on_rank=0), ""),
)
"""What happens, who makes it happen, and what each surviving rank says of it."""


@pytest.mark.parametrize("faults", [FAULTS[::5], pytest.param(FAULTS, marks=pytest.mark.slow)], ids=["two", "every"])
def test_an_export_that_fails_on_one_rank_ends_on_all_and_is_made_up_for_by_the_next_start(sharded, tmp_path, faults):
    run, log = Path(sharded["output_dir"]), tmp_path / "log"
    final = run / "final"
    with replacement(final, overwrite=False) as folder:
        (folder / "weights").write_text("an older model")
        (folder / "config.json").write_text("{}")
    for name, sabotage, reason in faults:
        log.unlink(missing_ok=True)
        with Ranks(sharded, 2, log, sabotage) as ranks:
            codes = ranks.join()
        said = log.read_text()
        assert set(codes) <= {1, -9} and ("killed" in name) == (-9 in codes), f"{name}: {codes}\n{said[-4000:]}"
        kind = "RuntimeError" if "killed" in name else "OSError"  # after which a job restarts, or does not
        errors = re.findall(rf"^{kind}: .*{re.escape(str(final))}.*{reason}", said, re.MULTILINE)
        assert len(errors) == codes.count(1), f"{name}: {errors}\n{said[-4000:]}"
        assert (final / "weights").read_text() == "an older model", name
        assert "rank 0 is killed" in name or sorted(path.name for path in run.glob(".final*")) == [], name
    train_ranks(sharded, 2, log)
    assert load_model(final).compression.target_ratio == 4
    assert sorted(path.name for path in run.glob(".final*")) == []
    starts = [json.loads(line)["step"] for line in (run / "starts.jsonl").read_text().splitlines()]
    assert starts == [0] + len(faults) * [1]  # nothing is trained twice


def test_a_snapshot_waits_for_the_checkpoint_before_it(sharded, tmp_path):
    sharded["training"] |= {"stages": {"retrofit": {"length": "4 steps"}}, "snapshot_ratios": [2.5]}
    sharded["training"] |= {"checkpoint_every_steps": 1}
    with Ranks(sharded, 2, tmp_path / "log", partial(write_slowly, on_rank=1)) as ranks:
        assert ranks.join() == [0, 0], (tmp_path / "log").read_text()[-4000:]
    run = Path(sharded["output_dir"])
    assert load_model(run / "snapshots" / "cr2.5").compression.target_ratio == 2.5
    assert load_model(run / "final").compression.target_ratio == 4
