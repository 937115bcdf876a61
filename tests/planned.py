"""Small runs to plan."""

from dmc.config import build_config
from dmc.training.config import PlannerConfig, RunConfig
from dmc.training.planning.planner import plan_training

TEXT = {"_target_": "dmc.data.StandardLibrarySource"}
SHAPE = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024,
}  # fmt: skip


def run(shape=SHAPE, compression=True, **changes):
    values = {
        "base": {"shape": shape},
        "data": {"train": {"text": TEXT}, "validation": {"text": TEXT}, "tokenizer": {"path": "somewhere"}},
        "compression": {"window_size": 2} if compression is True else compression,
        "training": {
            "stages": {"zero_out": {"length": "2 steps"}, "retrofit": {"length": "5 steps"}},
            "batch_size": 64, "sequence_length": 64, "micro_batch_size": 2,
        },
        "trainer": {"accelerator": "cpu"},
    }  # fmt: skip
    for name, value in changes.items():
        group, key = name.split("__")
        values[group] = {**values[group], key: value}
    return build_config(RunConfig, values)


def gpus(**changes):
    return run(**{"trainer__accelerator": "gpu", "compression": None, **changes})


def plan(config, **planner):
    return plan_training(config, PlannerConfig(**planner))
