"""The shape of a run's model, without its weights."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from dmc.config import RunConfig
from dmc.models.gqa import merge_heads_of_config


def model_shape(config: RunConfig, with_vocabulary: bool = True) -> PretrainedConfig:
    """Give the transformers configuration of the model that a run trains, its KV heads merged if they are to be.

    Without `with_vocabulary`, that of a fresh model need not be known: a start gets it from the tokenizer.

    Raises:
        ValueError: it is not known, or the heads cannot be merged so.
    """
    shape = base_shape(config, with_vocabulary)
    if config.model.merge_kv_heads is not None:
        merge_heads_of_config(shape, config.model.merge_kv_heads)
    return shape


def base_shape(config: RunConfig, with_vocabulary: bool = True) -> PretrainedConfig:
    """Find the transformers configuration of the model a run starts from: in its folder, in the YAML, or on the hub.

    Raises:
        ValueError: none of these has it.
    """
    settings = config.model
    if settings.path is not None and (Path(settings.path) / "config.json").is_file():
        return AutoConfig.from_pretrained(settings.path, trust_remote_code=False)
    values = settings.fresh or settings.architecture
    if values is None:
        try:
            return AutoConfig.from_pretrained(settings.path, revision=settings.revision, trust_remote_code=False)
        except OSError as error:
            raise ValueError(
                f"model.path={settings.path} is no folder with a config.json and cannot be reached on the hub: give "
                "the values of its configuration as model.architecture, as configs/model/llama2_7b.yaml does"
            ) from error
    values = dict(values)
    if settings.fresh is not None and "vocab_size" not in values and with_vocabulary:
        if config.data.tokenizer.train_vocab_size is None:
            raise ValueError("the plan of a fresh model needs model.fresh.vocab_size: its tokenizer is not read")
        values["vocab_size"] = config.data.tokenizer.train_vocab_size
    if "model_type" not in values:
        raise ValueError("the model's configuration values have no model_type: name a family such as llama")
    return AutoConfig.for_model(values.pop("model_type"), **values)
