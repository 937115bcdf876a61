import json

import pytest

from dmc.training.record import is_rank_zero, record_start

LAUNCHERS = ("RANK", "NODE_RANK", "LOCAL_RANK", "SLURM_PROCID")


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "8", "LOCAL_RANK": "0"}, False),
        ({"RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "1"}, True),  # torchrun inside srun
        ({"SLURM_PROCID": "0"}, True),
        ({"SLURM_PROCID": "3"}, False),
        ({"NODE_RANK": "1", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "1"}, False),
    ],
)
def test_one_process_of_each_launcher_is_the_first(variables, first, monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_rank_zero() == first


def test_every_start_is_a_line_with_its_step_and_job_and_no_token(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JWT", "secret")
    for step in (0, 40):
        record_start(tmp_path, step)
    lines = (tmp_path / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 40]
    assert json.loads(lines[1])["slurm"] == {"SLURM_JOB_ID": "17"}
    assert "secret" not in lines[1]
    assert "torch==" in (tmp_path / "packages.txt").read_text()
