import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from launching import Ranks, skip_collectives

from dmc.training.flight_recorder import flight_recorder


@pytest.mark.slow
def test_a_hung_run_leaves_the_trace_of_every_rank_and_the_analyser_names_the_missing_one(run_values, tmp_path):
    run_values["trainer"] |= {"devices": 2, "strategy": "ddp"}
    log = tmp_path / "ranks.log"
    with Ranks(run_values, 2, log, partial(skip_collectives, timeout=2)) as ranks:
        assert all(ranks.join())
    traces = Path(run_values["output_dir"]) / "logs" / "flight_recorder" / "gloo"
    assert sorted(path.name for path in traces.iterdir()) == ["rank_0", "rank_1"], log.read_text()[-4000:]
    assert f"to compare the ranks: torchfrtrace {traces}" in log.read_text()
    program = Path(sys.executable).with_name("torchfrtrace")
    said = subprocess.run([program, traces], capture_output=True, text=True, check=True, timeout=60).stderr
    assert "missing ranks: {1}" in said and "collective: gloo:" in said


def test_nccl_is_told_where_to_write_before_the_group_starts_and_only_while_the_run_lasts(tmp_path, monkeypatch):
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    earlier = tmp_path / "logs" / "flight_recorder" / "gloo" / "rank_7"
    earlier.parent.mkdir(parents=True)
    earlier.write_bytes(b"")
    with flight_recorder(tmp_path):
        assert earlier.exists()  # a restart after a hang keeps what tells of it
        prefix = Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"])  # the watchdog adds the rank's number
        assert prefix == tmp_path / "logs" / "flight_recorder" / "nccl" / "rank_" and prefix.parent.is_dir()
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert dict(os.environ) == before
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/elsewhere/rank_")
    with flight_recorder(tmp_path):
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == "/elsewhere/rank_"
