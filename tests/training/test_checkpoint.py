import pickle

import pytest
import torch

from dmc.models import load_model
from dmc.training import train
from dmc.training.checkpoint import AtomicCheckpointIO, load_checkpoint_model, load_weights, read_checkpoint


@pytest.fixture
def checkpoint_path(run_config):
    return train(run_config).folder / "checkpoints" / "last.ckpt"


def test_model_comes_back_from_a_checkpoint_alone(checkpoint_path):
    model = load_checkpoint_model(checkpoint_path)
    exported = load_model(checkpoint_path.parent.parent / "final")
    for name, value in exported.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_truncated_checkpoint_says_so(checkpoint_path):
    content = checkpoint_path.read_bytes()
    for size in (0, 100, len(content) // 2, len(content) - 1):
        checkpoint_path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="cut off or is no training checkpoint"):
            read_checkpoint(checkpoint_path)


def test_foreign_files_are_refused(tmp_path):
    foreign = tmp_path / "foreign.ckpt"
    torch.save({"weights": torch.zeros(2)}, foreign)
    with pytest.raises(ValueError, match="are expected in it"):
        read_checkpoint(foreign)
    with pytest.raises(FileNotFoundError, match=r"last.ckpt"):
        read_checkpoint(tmp_path / "absent.ckpt")


def test_checkpoint_with_code_is_refused(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (print, ("executed",))

    path = tmp_path / "harmful.ckpt"
    with path.open("wb") as file:
        pickle.dump({"state_dict": Harmful()}, file)
    with pytest.raises(ValueError, match="is no training checkpoint"):
        read_checkpoint(path)


def test_checkpoint_of_another_model_says_what_differs(checkpoint_path):
    checkpoint, model = read_checkpoint(checkpoint_path), load_checkpoint_model(checkpoint_path)
    name = next(iter(checkpoint["state_dict"]))
    wrong = dict(checkpoint, state_dict={**checkpoint["state_dict"], name: torch.zeros(3)})
    with pytest.raises(ValueError, match=r"has shape \(3,\) in the checkpoint"):
        load_weights(model, wrong, checkpoint_path)
    fewer = dict(checkpoint, state_dict={k: v for k, v in checkpoint["state_dict"].items() if k != name})
    with pytest.raises(ValueError, match="1 weights missing"):
        load_weights(model, fewer, checkpoint_path)


def test_failed_write_leaves_the_checkpoint_before(tmp_path):
    path = tmp_path / "last.ckpt"
    writer = AtomicCheckpointIO()
    writer.save_checkpoint({"a": 1}, path)
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        writer.save_checkpoint({"a": lambda: None}, path)
    assert torch.load(path, weights_only=True) == {"a": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["last.ckpt"]
