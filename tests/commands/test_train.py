"""What `dmc train` ends with, by which a job decides whether to start again."""

import pytest
from scripts_here import run_script

ERRORS = [
    (RuntimeError("CUDA error: an illegal memory access"), "70"),
    (MemoryError(), "70"),
    (ConnectionError("Server Disconnected"), "70"),  # of datasets, while text streams from the hub
    (ValueError("text ends"), "error: text ends"),
    (OSError(28, "No space left on device"), "error: [Errno 28] No space left on device"),
    (NotImplementedError("this model"), "error: this model"),
]


@pytest.mark.parametrize(("error", "said"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS])
def test_failures_of_the_machine_and_the_network_ask_for_another_start(error, said, monkeypatch, tmp_path, capsys):
    def fail(config):
        raise error

    monkeypatch.setattr("dmc.training.run.train", fail)
    assert run_script("train.py", "experiment=quickstart_tiny_base", f"output_dir={tmp_path}/run") == said
    assert ("Traceback" in capsys.readouterr().err) == (said == "70")
