"""Machine-independent checks of a start, before it reads a weight or writes; a plan runs the same."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from dmc.compression.full_attention import layer_windows
from dmc.data import MegatronSource, local_copy
from dmc.data.streaming import check_stream_shards
from dmc.models.conversion import check_retrofit
from dmc.models.gqa import merge_heads_of_config
from dmc.models.tensor_parallel import check_divides
from dmc.models.weights import read_model_config
from dmc.training.config import RunConfig
from dmc.training.stages import Plan
from dmc.training.text_data import build_sources

logger = logging.getLogger(__name__)


def check_start(config: RunConfig, num_local: int) -> None:
    """Refuse a run that could not start on so many devices of each node.

    Checks that depend on the machine are left to the start: its GPUs, installed libraries, a login, the text.

    Raises:
        ValueError, NotImplementedError: batch, stream shards, heads or devices cannot be divided so, the model is not
            known or cannot have these gates, a source is none, or the stages contradict each other.
    """
    trainer, training, data = config.trainer, config.training, config.data
    num_copies, shard_size, tensor_size = trainer.mesh(num_local)
    num_ranks = num_copies * shard_size // trainer.context_parallel_size
    training.accumulation(num_ranks)
    Plan(training, config.target_ratio, config.compression)
    for split in ("train", "validation", "calibration", "test"):
        sources = build_sources(getattr(data, split) or {}, split)
        if split == "train" and data.streaming:
            check_stream_shards(data.stream_shards, num_ranks)
            for name, source in zip(data.train, sources, strict=True):
                if isinstance(source, MegatronSource):
                    raise ValueError(
                        f"data.train.{name} is MegatronSource, which cannot be streamed: set data.streaming=false"
                    )
    model = model_shape(config, with_vocabulary=False)
    if config.gates is not None:
        check_retrofit(model, config.gates)
    if trainer.devices_per_sequence > 1:
        check_divides(model, tensor_size, trainer.context_parallel_size)
    if trainer.strategy == "deepspeed_zero3" and training.document_masking and 0 in (windows := layer_windows(model)):
        raise ValueError(  # each gathers weights for each of its documents: ranks with fewer would keep others waiting
            f"layer {windows.index(0)} of this {model.model_type} model has no attention and takes documents one by "
            "one, which deepspeed_zero3 cannot: use trainer.strategy=fsdp2, or training.document_masking=false"
        )
    if training.sequence_length > model.max_position_embeddings:
        logger.warning(
            "training.sequence_length=%d is beyond the %d positions that the model knows (max_position_embeddings)",
            training.sequence_length, model.max_position_embeddings,
        )  # fmt: skip


def model_shape(config: RunConfig, with_vocabulary: bool = True) -> PretrainedConfig:
    """Give the transformers configuration of the model that a run trains, its KV heads merged if they are to be.

    Without `with_vocabulary`, that of a fresh model need not be known: a start gets it from the tokenizer.
    """
    shape = base_shape(config, with_vocabulary)
    if config.merge_kv_heads is not None:
        merge_heads_of_config(shape, config.merge_kv_heads)
    return shape


def base_shape(config: RunConfig, with_vocabulary: bool = True) -> PretrainedConfig:
    """Find the transformers configuration of the model a run starts from: in its folder, configs/base or on the hub.

    Raises:
        ValueError: it cannot be found, or its values name no model type or no vocabulary.
    """
    model = config.model
    if model is not None and (Path(model) / "config.json").is_file():
        return read_model_config(Path(model))
    if model is not None and model != config.base.path:
        folder = local_copy(model, config.revision, files=["config.json"])
        revision = config.revision if folder == model else None
        try:
            return AutoConfig.from_pretrained(folder, revision=revision, trust_remote_code=False)
        except OSError as error:
            raise ValueError(
                f"model={model} is no folder with a config.json and cannot be reached on the hub: check the name, or "
                "give its base.path and base.shape, as configs/base/llama2_7b.yaml does"
            ) from error
    values = dict(config.base.shape)
    if model is None and "vocab_size" not in values and with_vocabulary:
        if config.data.tokenizer.train_vocab_size is None:
            raise ValueError("the plan of a fresh model needs base.shape.vocab_size: its tokenizer is not read")
        values["vocab_size"] = config.data.tokenizer.train_vocab_size
    if "model_type" not in values:
        raise ValueError("the model's configuration values have no model_type: name a family such as llama")
    return AutoConfig.for_model(values.pop("model_type"), **values)
