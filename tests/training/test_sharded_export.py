"""Ranks that hold parts of a model export it together: into any folder, and all of it or nothing."""

from pathlib import Path

import pytest
from launching import train_ranks

from dmc.models import load_model


@pytest.fixture
def sharded(run_values):
    run_values["trainer"] |= {"devices": 2, "strategy": "fsdp2"}
    run_values["training"] |= {"stages": {"retrofit": {"steps": 1}}, "calibrate": False}
    return run_values


def test_a_folder_of_any_name_is_exported_to(sharded, tmp_path):
    sharded["output_dir"] = str(tmp_path / "[a]" / "what?" / "*")
    train_ranks(sharded, 2, tmp_path / "log")
    assert load_model(Path(sharded["output_dir"]) / "final").compression.target_ratio == 4
