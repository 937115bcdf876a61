"""Turn a stock Hugging Face model class into its compressed counterpart: config, installation, generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, PretrainedConfig, PreTrainedModel

from dmc.compression import CompressionConfig, Compressor, GateMode, full_attention_tables
from dmc.compression.full_attention import layer_windows, refuse_other_attention, refuse_windows_alone
from dmc.models.adapter import GateAdapter
from dmc.models.adapter_folder import adapter_behind, given_weights
from dmc.models.attention import CompressedAttentionMixin
from dmc.models.recurrent import attention_layers, install_recurrent
from dmc.models.stock_attention import ATTENTION_NAME, UNPADDED_ATTENTION, rotate_own_tokens
from dmc.models.ties import follow_tensors
from dmc.models.token_losses import TokenLossMixin, with_token_losses
from dmc.models.weights import check_weights, without_base
from dmc.ranks import ALONE, Ranks


class CompressedConfigMixin:
    """Adds `compression`, the fields of a `CompressionConfig` as a nested dict, to a stock configuration."""

    compression: dict[str, Any]

    def __post_init__(self, compression: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.compression = CompressionConfig.from_dict(compression or {}).to_dict()
        super().__post_init__(**kwargs)  # type: ignore[misc]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read the configuration of a folder.

        Raises:
            ValueError: the gates' settings are missing; defaults would make another model.
        """
        if not (config_dict.get("compression") or kwargs.get("compression")):
            raise ValueError(
                f"this config.json of a {config_dict.get('model_type')} model has no compression, the settings of its "
                "gates: copy the folder again, or export it anew"
            )
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]


class CompressedCausalLM(TokenLossMixin, PreTrainedModel):
    """Mixed in before a stock `*ForCausalLM`: the `self_attn` of layers with full attention becomes compressed.

    Raises:
        NotImplementedError: see `refuse_other_attention`; or no layer has full attention.
        ValueError: the head cannot lend a neuron.
    """

    _is_stateful = True  # merged tokens cannot be rolled back: transformers then refuses assisted decoding
    attention_class: ClassVar[type[CompressedAttentionMixin]]
    _ranks = ALONE

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        refuse_other_attention(config)
        refuse_windows_alone(config)
        config._attn_implementation = ATTENTION_NAME
        super().__init__(config, *args, **kwargs)
        for index, window in enumerate(layer_windows(config)):
            if window is None:
                self.model.layers[index].self_attn = self.attention_class(config, index)
            elif window:
                self.model.layers[index].self_attn.register_forward_pre_hook(rotate_own_tokens, with_kwargs=True)
        install_recurrent(self)
        with_token_losses(self)
        self.post_init()

    @property
    def compressed_layers(self) -> list[Any]:
        """The decoder layers with gates: those with full attention."""
        gated = {attn.layer_idx for attn in attention_layers(self) if isinstance(attn, CompressedAttentionMixin)}
        return [self.model.layers[index] for index in sorted(gated)]

    @property
    def ranks(self) -> Ranks:
        """The processes that share each layer's heads."""
        return self._ranks

    @ranks.setter
    def ranks(self, ranks: Ranks) -> None:
        self._ranks = ranks
        for layer in self.compressed_layers:
            layer.self_attn.compressor.ranks = ranks

    @property
    def compression(self) -> CompressionConfig:
        """The gates' configuration."""
        return CompressionConfig.from_dict(self.config.compression)

    @compression.setter
    def compression(self, compression: CompressionConfig) -> None:
        check_gates(self.config, compression)
        self.config.compression = compression.to_dict()
        for layer in self.compressed_layers:
            layer.self_attn.compressor = Compressor(compression, layer.self_attn.head_dim, self.ranks)

    def rotary_tables(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin that remove the borrowed neuron, [B, T, D] in the model's dtype; position_ids [B, T].

        States that still hold the neuron may be rotated: its partner channel takes nothing from it.
        """
        attention, like = self.compressed_layers[0].self_attn, self.model.embed_tokens.weight
        rotary = attention.rotation.whole(full_attention_tables(self.model.rotary_emb, like, position_ids))
        cos, sin = attention.rotation.tables(rotary, attention.head_dim, like.dtype)
        scale = attention.compressor.neuron_scale(0.0, cos)
        return cos * scale, sin * scale * scale.roll(len(scale) // 2)

    def neuron_rows(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """Yield the weights (and biases) of W_q and W_k with the rows that produce the borrowed neuron, if any.

        With `gate_input="query"` those of W_q alone, in the first head of each group.
        """
        compression = self.compression
        if not compression.borrows_neuron:
            return
        rotary = self.model.rotary_emb
        angles = rotary.full_attention_inv_freq if hasattr(rotary, "full_attention_inv_freq") else rotary.inv_freq
        rotated = 2 * len(angles)
        for layer in self.compressed_layers:
            attention = layer.self_attn
            dim, fused = attention.head_dim, hasattr(attention, "qkv_proj")
            first = attention.rotation.channel(compression.neuron_index, dim, rotated)
            queries, keys = (
                count * dim for count in (self.config.num_attention_heads, self.config.num_key_value_heads)
            )
            of_head = 2 * dim if attention.gates_output else dim  # rows of W_q
            if not compression.borrows_key_neuron:
                rows = slice(first, queries if fused else None, of_head * attention.num_key_value_groups)
                projections = [(attention.qkv_proj if fused else attention.q_proj, rows)]
            elif fused:
                projections = [(attention.qkv_proj, slice(first, queries + keys, dim))]
            else:
                places = slice(first, None, of_head), slice(first, None, dim)
                projections = list(zip((attention.q_proj, attention.k_proj), places, strict=True))
            for projection, rows in projections:
                for parameter in projection.parameters():
                    yield parameter, rows

    def adapters(self) -> list[GateAdapter]:
        """Return the layers' adapters; empty where the gates read the borrowed neuron alone."""
        return [module for module in self.modules() if isinstance(module, GateAdapter)]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load an exported folder, or an adapter of gates and its base, as safetensors and JSON only.

        Raises:
            ValueError, FileNotFoundError: a shard is missing or truncated, or a weight has another shape.
        """
        name, config = pretrained_model_name_or_path, kwargs.get("config")
        check_weights(name, cls)
        adapter = adapter_behind(name, config, kwargs.get("revision"))
        if adapter is not None:
            if not isinstance(config, PretrainedConfig):
                config = cls.config_class.from_pretrained(adapter)
            kwargs = {**kwargs, **given_weights(adapter), "config": config, "revision": None}
        given = {**kwargs, "use_safetensors": True, "trust_remote_code": False}
        found = super().from_pretrained(name if adapter is None else None, *args, **given)
        model = follow_tensors(found[0] if isinstance(found, tuple) else found)
        if adapter is not None:
            model.name_or_path = without_base(model.config).name_or_path = str(name)
        return found

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """Run the stock forward; a plain call is the parallel form, and only `use_cache=True` makes a cache.

        Positions count columns, as in the stock model, but from the first real token: without the borrowed neuron RoPE
        is no longer purely relative, so left padding must not shift them. `labels` give the stock loss beside all
        logits; `targets`, among the other keywords, gives each token's loss without logits, see `TokenLossMixin`.

        Raises:
            TypeError: `past_key_values` is not a compressed cache.
            ValueError: the mask is no padding mask, or a cache would count positions differently.
        """
        check_padding_mask(attention_mask)
        if past_key_values is None and use_cache:
            past_key_values = self.make_cache()
        if past_key_values is not None and not hasattr(past_key_values, "attend"):
            raise TypeError(
                f"{type(past_key_values).__name__} cannot hold a compressed cache: leave past_key_values unset"
            )
        if position_ids is None and attention_mask is not None:
            position_ids = positions_of(attention_mask) if past_key_values is None else None
            if past_key_values is not None and has_holes(attention_mask):
                raise ValueError(
                    "attention_mask has 0 between real tokens: a compressed cache stores real tokens alone, one after "
                    "the other; pad on the left, or pass position_ids=attention_mask.cumsum(-1) - 1 (those of "
                    "the new tokens), as generate() does"
                )
        if past_key_values is not None:
            kwargs["paged_cache"] = past_key_values  # where layers with a window find it
        if (mode := kwargs.get("gate_mode")) is not None and past_key_values is None:
            tokens: Any = input_ids if inputs_embeds is None else inputs_embeds
            kwargs["gate_mode"] = self._with_noise(mode, tokens)
        if position_ids is None and self.context_ranks.size > 1:  # keys are rotated where a rank has all tokens
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # type: ignore[union-attr]
        return super().forward(
            input_ids=input_ids,
            padding_mask=None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool(),
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=past_key_values is not None,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    def _with_noise(self, mode: GateMode, tokens: Tensor) -> GateMode:
        """Draw the noise of a pass over tokens, [B, T, ...], before its first layer."""
        layers = [layer.self_attn.layer_idx for layer in self.compressed_layers]
        compressor = self.model.layers[layers[0]].self_attn.compressor
        return compressor.with_noise(mode, layers, self.config.num_key_value_heads, tokens.shape[1], tokens.device)

    def make_cache(self) -> Cache:
        """Return an empty cache for `forward` or `generate`."""
        from dmc.runtime.hf_cache import PagedGenerationCache  # training makes no cache

        return PagedGenerationCache(self)

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Generate from the compressed cache; see `transformers.GenerationMixin.generate`.

        Right padding is moved to the left first, so that the next token follows the last real one; the returned
        sequences start with the prompts as moved. Columns that a given cache has seen stay where they are.
        """
        input_ids = kwargs.pop("input_ids", inputs)
        attention_mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
        check_padding_mask(attention_mask)
        if input_ids is not None and attention_mask is not None:
            num_seen = 0 if cache is None else cache.get_seq_length()
            input_ids, kwargs["attention_mask"] = pad_on_the_left(input_ids, attention_mask, num_seen)
        return super().generate(input_ids, *args, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} cannot hold a compressed cache: "
                "leave it unset"
            )
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = self.make_cache()


def check_gates(config: Any, compression: CompressionConfig) -> None:
    """Refuse a configuration whose layers cannot have these gates.

    Raises:
        ValueError: the head cannot lend a neuron, or an adapter is missing or in the way.
        NotImplementedError: see `refuse_other_attention`.
    """
    refuse_other_attention(config)
    refuse_windows_alone(config)
    Compressor(compression, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if config.model_type.startswith("dmc_"):
        before = CompressionConfig.from_dict(config.compression)
        if compression.has_adapter != before.has_adapter:
            raise ValueError(
                f"gate_input={compression.gate_input!r} cannot replace {before.gate_input!r} in a model that is "
                "already compressed: an adapter is part of its weights; retrofit the stock model"
            )


def check_padding_mask(attention_mask: Any) -> None:
    """Refuse a mask that is not a padding mask.

    Raises:
        ValueError: its shape is not [batch, tokens].
    """
    if attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.dim() == 2):
        return
    is_tensor = isinstance(attention_mask, Tensor)
    what = f"shape {tuple(attention_mask.shape)}" if is_tensor else f"type {type(attention_mask).__name__}"
    raise ValueError(
        f"attention_mask of {what}: compressed attention takes a padding mask [batch, tokens], 1 at real tokens; "
        "the gates decide which token attends to which"
    )


def positions_of(attention_mask: Tensor) -> Tensor:
    """Count columns from each row's first real token, int64 [B, T]; 0 before it."""
    columns = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
    return (columns - attention_mask.bool().int().argmax(-1, keepdim=True)).clamp_min(0)


def has_holes(attention_mask: Tensor) -> bool:
    """Tell whether a row of a padding mask, [B, T], has padding between real tokens."""
    real = attention_mask.bool().int()
    return bool((real.diff(dim=-1, prepend=torch.zeros_like(real[:, :1])) == 1).sum(-1).gt(1).any())


def pad_on_the_left(input_ids: Tensor, attention_mask: Tensor, num_seen: int) -> tuple[Tensor, Tensor]:
    """Move the padding of the columns from `num_seen` on to their left.

    Args:
        input_ids: tokens, [B, T], or those of the moved columns alone.
        attention_mask: 1 for tokens, 0 for padding, [B, T].
        num_seen: columns that stay, since a cache holds them.
    Returns:
        Both, in their shapes.
    """
    seen, new = attention_mask.tensor_split([num_seen], dim=-1)
    order = new.long().argsort(dim=-1, stable=True)  # padding first, tokens in their order
    fed, tokens = input_ids.tensor_split([input_ids.shape[-1] - new.shape[-1]], dim=-1)
    return torch.cat((fed, tokens.gather(-1, order)), dim=-1), torch.cat((seen, new.gather(-1, order)), dim=-1)


def for_unpadded(model: Any) -> Any:
    """Let a stock causal LM attend without a mask to sequences that are never padded, as a compressed one does."""
    if not isinstance(model, CompressedCausalLM):
        model.set_attn_implementation(UNPADDED_ATTENTION)
        install_recurrent(model)
    return model
