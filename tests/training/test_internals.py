"""What is used of Lightning and DeepSpeed beside their documented interfaces: an upgrade that changes it fails here."""

import ast
import inspect
import json
from pathlib import Path

import pytest
from cpu_deepspeed import describe_engines
from launching import Processes
from lightning import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy

import dmc.training

LIGHTNING = {"_configure_launcher"}
"""Private names of Lightning's strategies that are overridden."""
ENGINES = {
    (1, "fp32"): ("single_partition_of_fp32_groups", "bit16_groups"),
    (1, "bf16"): ("fp32_groups_flat_partition", "bf16_groups"),
    (2, "fp32"): ("single_partition_of_fp32_groups", "bit16_groups"),
    (2, "bf16"): ("single_partition_of_fp32_groups", "bit16_groups"),
    (3, "fp32"): ("fp32_partitioned_groups_flat", None),
    (3, "bf16"): ("fp32_partitioned_groups_flat", None),
}
"""Where each of DeepSpeed's optimizers keeps its float32 weights, and the parameters of each."""


def private_names():
    """Collect the private attributes that the code of training uses."""
    files = Path(dmc.training.__file__).parent.rglob("*.py")
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    used |= {statement.name for node in classes for statement in node.body if isinstance(statement, ast.FunctionDef)}
    return {name for name in used if name.startswith("_") and not name.startswith("__")}


def test_these_are_all_private_names_of_lightning_that_are_used():
    theirs = {*dir(ModelParallelStrategy()), *dir(DeepSpeedStrategy()), *dir(Trainer(logger=False, accelerator="cpu"))}
    assert private_names() & theirs == LIGHTNING


@pytest.mark.parametrize("name", sorted(LIGHTNING))
def test_lightning_has_the_strategies_private_names(name):
    value = getattr(ModelParallelStrategy(), name)
    if inspect.ismethod(value):
        assert not inspect.signature(value).parameters, name


@pytest.mark.slow
def test_deepspeed_keeps_weights_and_links_where_they_are_read(tmp_path):
    log, file = tmp_path / "log", tmp_path / "found"
    engines = [(stage, precision == "bf16") for stage, precision in ENGINES]
    with Processes(describe_engines, (engines, file), 1, log) as processes:
        assert processes.join() == [0], log.read_text()[-4000:]
    found = dict(zip(ENGINES, json.loads(file.read_text()), strict=True))
    assert found == {
        engine: {
            "weights": [weights],
            "they are flat, float32 and have AdamW's states": True,
            "groups": groups,
            "a step that is not finite is applied": False,
            "a finite step is applied": True,
            "shape of a weight": [3, 4],
        }
        for engine, (weights, groups) in ENGINES.items()
    }
