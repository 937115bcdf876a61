"""A step is traced once, however many tests plan it, in however many processes."""

import hashlib
import json

import pytest
from filelock import FileLock

from dmc.training.planning import peak_memory


@pytest.fixture(scope="session")
def traces(tmp_path_factory, worker_id):
    """Folder that all processes of the session share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "traces"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def traced_once(traces, monkeypatch):
    plain = peak_memory._trace_layers

    def trace_layers(config, layers, micro_batches):
        key = repr((config, layers, min(micro_batches, 2)))
        path = traces / hashlib.sha256(key.encode()).hexdigest()
        with FileLock(f"{path}.lock"):
            if not path.exists():
                path.write_text(json.dumps(plain(config, layers, micro_batches)))
        return json.loads(path.read_text())

    monkeypatch.setattr(peak_memory, "_trace_layers", trace_layers)
