"""Convert a Megatron checkpoint to a Hugging Face folder, stock or with gates, and back: folders in, folders out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import CONFIG_NAME

from dmc.data.numbering import num_ids
from dmc.files import refuse_occupied, replacement
from dmc.megatron.checkpoint import FILE_NAMES, LAYER, TRACKER, Checkpoint, read_checkpoint
from dmc.megatron.mapping import EMBEDDING, OUTPUT, Part, arguments_of, configuration_of, parts_of
from dmc.models.loading import load_tokenizer
from dmc.models.weights import INDEX_NAME, check_weights, open_weights, read_model_config
from dmc.training.model_folder import ModelCard, describe

FILE_SIZE = 2 * 10**9
"""Bytes of weights in one file, and in memory at once."""
ONLY_IF_TIED = (OUTPUT, "word_embeddings_for_head.weight")
"""Copies of the embedding that the last pipeline stage holds."""
CHECKPOINT_VERSION = 3.0
TRANSFORMER_ENGINE = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Modules of a layer that look for an extra state (of FP8) when a checkpoint is loaded."""


def import_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    arguments: dict[str, Any] | None = None,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a Megatron checkpoint of a Llama as a Hugging Face folder, a file of weights at a time.

    Args:
        checkpoint: folder with `mp_rank_00` ..., or one whose tracker names it; any tensor and pipeline parallel size.
        output: new or empty folder.
        arguments: Megatron's arguments that the checkpoint lacks or has wrong; `dmc_init_val: None` drops the gates.
        tokenizer: folder or hub name, saved beside the weights.
        vocab_size: tokens without padding; None: the tokenizer's, Megatron's own, or with padding where none is known.
        overwrite: replace a folder that was exported here.
    Returns:
        The folder.
    Raises:
        FileNotFoundError, ValueError: see `read_checkpoint` and `plan_of`.
        FileExistsError: `output` may not be written or replaced, see `refuse_occupied`.
    """
    inputs = [checkpoint] if tokenizer is None else [checkpoint, Path(tokenizer)]
    refuse_occupied(output, overwrite, inputs, CONFIG_NAME)
    source = read_checkpoint(checkpoint, arguments or {})
    saved_tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
    if vocab_size is None:
        vocab_size = source.arguments.get("vocab_size") if saved_tokenizer is None else num_ids(saved_tokenizer)
    config, parts = plan_of(source, vocab_size)
    if saved_tokenizer is not None:
        config.bos_token_id, config.eos_token_id = saved_tokenizer.bos_token_id, saved_tokenizer.eos_token_id
    gates = getattr(config, "compression", None)
    card = ModelCard("A Llama from Megatron-LM", base=str(checkpoint), data="not known here")
    with replacement(output, overwrite, inputs, CONFIG_NAME) as partial:
        write_weights(partial, parts, source.shards)
        config.save_pretrained(partial)
        GenerationConfig.from_model_config(config).save_pretrained(partial)
        describe(partial, saved_tokenizer, card, gates)
        check_weights(partial)
    return output


def plan_of(source: Checkpoint, vocab_size: int | None) -> tuple[Any, list[Part]]:
    """Find the model that a checkpoint holds, and check every tensor of it.

    Args:
        source: the checkpoint.
        vocab_size: tokens without padding; None: all rows are tokens.
    Returns:
        Its Hugging Face configuration and its tensors.
    Raises:
        ValueError: see `configuration_of`; or a tensor is missing, unexpected or of another shape, or a replicated
            tensor differs between ranks.
    """
    shards, tensor_size = source.shards, source.tensor_size
    if EMBEDDING not in shards:
        raise ValueError(f"the checkpoint lacks {EMBEDDING}: expected the weights of a GPT model")
    padded = shards[EMBEDDING][0].shape[0] * tensor_size
    vocab_size = padded if vocab_size is None else vocab_size
    if not 0 < vocab_size <= padded:
        raise ValueError(f"vocab_size={vocab_size}: expected 1 to {padded}, the rows of the checkpoint's embedding")
    tied = not source.arguments.get("untie_embeddings_and_output_weights", OUTPUT in shards)
    copies = zip(shards[EMBEDDING], shards.get(OUTPUT, ()), strict=False)
    tied = tied and all(torch.equal(embedding, output) for embedding, output in copies)
    config = configuration_of(source.arguments, vocab_size, shards[EMBEDDING][0].dtype, tied)
    parts = list(parts_of(config, tensor_size, padded))
    check_tensors(source, config, parts)
    return config, parts


def check_tensors(source: Checkpoint, config: Any, parts: list[Part]) -> None:
    """Raise ValueError unless a checkpoint holds exactly the tensors that its arguments ask for."""
    shards, tensor_size = source.shards, source.tensor_size
    num_layers = 1 + max((int(found[0]) for name in shards if (found := LAYER.search(name))), default=-1)
    if num_layers != config.num_hidden_layers:
        raise ValueError(f"the checkpoint holds {num_layers} layers, its num_layers says {config.num_hidden_layers}")
    for part in parts:
        if part.name not in shards:
            raise ValueError(f"the checkpoint lacks {part.name}: copy it again, or give the arguments of this model")
        for rank, shard in enumerate(shards[part.name]):
            if tuple(shard.shape) != part.shard_shape(tensor_size):
                raise ValueError(
                    f"{part.name} of rank {rank} has shape {tuple(shard.shape)}, the arguments ask for "
                    f"{part.shard_shape(tensor_size)} on each of {tensor_size} ranks"
                )
            if part.cut == "nowhere" and not torch.equal(shard, shards[part.name][0]):
                raise ValueError(
                    f"ranks 0 and {rank} hold different {part.name}: take both from the same iteration of one run"
                )
    known = {part.name for part in parts} | (set(ONLY_IF_TIED) if config.tie_word_embeddings else set())
    foreign = sorted(set(shards) - known)
    if foreign:
        raise ValueError(f"the checkpoint holds {foreign[0]} (and {len(foreign) - 1} more), which no Llama model has")


def write_weights(folder: Path, parts: list[Part], shards: dict[str, list[Tensor]]) -> None:
    """Join the ranks' tensors and write them as safetensors, one file at a time.

    Args:
        folder: folder of the model.
        parts: weights, in the order of the files.
        shards: tensors of each part by its name, one for each tensor parallel rank.
    """
    holders = {name: part for part in parts for name in part.weights}
    shapes = {
        name: torch.empty(shape, dtype=shards[part.name][0].dtype, device="meta")
        for part in parts
        for name, shape in zip(part.weights, part.shapes, strict=True)
    }
    plan = split_torch_state_dict_into_shards(shapes, max_shard_size=FILE_SIZE)
    for file_name, names in plan.filename_to_tensors.items():
        weights: dict[str, Tensor] = {}
        for part in dict.fromkeys(holders[name] for name in names):
            weights.update(zip(part.weights, part.join(shards[part.name]), strict=True))
        save_file({name: weights[name] for name in names}, folder / file_name, {"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def export_checkpoint(
    folder: Path, output: Path, *, tensor_size: int = 1, vocab_multiple: int = 128, overwrite: bool = False
) -> Path:
    """Write a stock or compressed Llama as a Megatron release checkpoint, a rank at a time.

    Calibrated gates have a separate decision offset, while Megatron has one `dmc_init_val` for decision and importance:
    the rows that produce the decision are then scaled, which keeps every decision up to rounding.

    Args:
        folder: Hugging Face folder.
        output: new or empty folder.
        tensor_size: tensor-parallel ranks.
        vocab_multiple: the rows of each rank's embedding are a multiple of this (--make-vocab-size-divisible-by).
        overwrite: replace a folder that was exported here.
    Returns:
        The output folder.
    Raises:
        FileNotFoundError, ValueError: see `check_weights` and `arguments_of`; or the model does not divide.
        FileExistsError: `output` may not be written or replaced, see `refuse_occupied`.
    """
    refuse_occupied(output, overwrite, [folder], TRACKER)
    check_weights(folder)
    config = read_model_config(folder)
    if tensor_size < 1 or vocab_multiple < 1:
        raise ValueError(f"tensor_size={tensor_size}, vocab_multiple={vocab_multiple}: expected whole numbers >= 1")
    step = tensor_size * vocab_multiple
    padded = -(-config.vocab_size // step) * step
    weights = open_weights(folder)
    arguments = arguments_of(config, tensor_size, padded, weights["model.embed_tokens.weight"][:0].dtype)
    parts = list(parts_of(config, tensor_size, padded))
    scale = decision_scale(config)
    with replacement(output, overwrite, [folder], TRACKER) as partial:
        (partial / TRACKER).write_text("release")
        for rank in range(tensor_size):
            model: dict[str, Tensor | None] = {}
            for part in parts:
                held = [scaled(name, weights[name][:], config.head_dim, scale) for name in part.weights]
                model[part.name] = part.shard(held, rank, tensor_size)
            for index in range(config.num_hidden_layers):
                model.update({f"decoder.layers.{index}.{module}._extra_state": None for module in TRANSFORMER_ENGINE})
            path = partial / "release" / f"mp_rank_{rank:02d}" / FILE_NAMES[0]
            path.parent.mkdir(parents=True)
            content = {"args": arguments, "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0, "model": model}
            torch.save(content, path)
    return output


def decision_scale(config: Any) -> float:
    """Return the factor on the decision rows that applies their scale and moves their threshold to omega_offset."""
    gates = getattr(config, "compression", None)
    if gates is None or gates["decision_offset"] == gates["omega_offset"]:
        return 1.0 if gates is None else gates["decision_scale"]
    return gates["decision_scale"] * gates["omega_offset"] / gates["decision_offset"]


def scaled(name: str, weight: Tensor, head_dim: int, scale: float) -> Tensor:
    """Scale the last row of every head of a key projection, [H D, hidden]; other weights stay as they are."""
    if scale == 1 or not name.endswith(".k_proj.weight"):
        return weight
    weight = weight.clone()
    weight[head_dim - 1 :: head_dim] *= scale
    return weight
