"""The model class that vLLM runs: an exported folder's own transformers model, over the cache of `worker_cache.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import MoeModelOutputWithPast
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context

from dmc.kernels import choose_backend
from dmc.models.adapter_folder import with_base
from dmc.models.build import fill_buffers, refuse_kernels
from dmc.models.tensor_parallel import shard_model
from dmc.models.ties import settle_ties
from dmc.models.weights import refuse_nonfinite
from dmc.policies.layer_attention import CacheAttention
from dmc.ranks import Ranks
from dmc.runtime import model_view
from dmc.runtime.backend_layers import use_backend_layers
from dmc.runtime.paged_forward import PagedForward
from dmc.vllm.attention import LAYER_NAME, AttentionStep, CacheLayer
from dmc.vllm.spec import HeapSpec
from dmc.vllm.worker_cache import WorkerCache

PAGE_SLOTS = 16
"""Most slots of a page."""


class DMCForCausalLM(nn.Module):
    """Serves every family of `dmc.models.families` whose layers all have full attention; see `plugin.check_model`.

    Args:
        vllm_config: what vLLM was started with.
        prefix: of the modules' names; unused.
    Raises:
        ValueError: heads cannot be divided evenly among tensor parallel ranks, or see `refuse_kernels`.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self._vllm_config = vllm_config
        config = vllm_config.model_config.hf_config
        refuse_kernels(config, vllm_config.model_config.model)
        with torch.device("meta"):
            self.causal_lm: Any = AutoModelForCausalLM.from_config(config, dtype=vllm_config.model_config.dtype)
        group = get_tp_group()
        self._ranks = Ranks(group.rank_in_group, group.world_size)
        self._cuts = shard_model(self.causal_lm, self._ranks) if self._ranks.size > 1 else {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take this rank's part of the folder's weights, then make all of the cache but its pages.

        Args:
            weights: whole weights by name.
        Returns:
            Names of the loaded parameters.
        """
        vllm, model = self._vllm_config, self.causal_lm
        device, dtype = torch.device(vllm.device_config.device_type), vllm.model_config.dtype
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        exact = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        stored = {}
        described = vllm.model_config
        for name, weight in with_base(weights, described.hf_config, described.model, described.revision):
            found = self._cuts[name].share(weight, self._ranks) if name in self._cuts else weight
            stored[name] = found.to(device, torch.float32 if any(module in name for module in exact) else dtype)
        refuse_nonfinite(stored.items(), vllm.model_config.model)
        settle_ties(model.config, stored)
        model.load_state_dict(stored, strict=False, assign=True)
        model.tie_weights()
        fill_buffers(model, device)
        if not hasattr(self, "cache"):
            self._open_cache(vllm)
        return {f"causal_lm.{name}" for name in (*stored, *(model.all_tied_weights_keys or ()))}

    def _open_cache(self, vllm: VllmConfig) -> None:
        model = self.causal_lm.eval().requires_grad_(False)
        layout, block_size = model_view.layout_of(model), vllm.cache_config.block_size
        assert layout.compression is not None
        slots = math.gcd(PAGE_SLOTS, block_size)
        self.cache = WorkerCache(layout, vllm.scheduler_config.max_num_seqs, slots, vllm.model_config.max_model_len)
        spec = HeapSpec(
            block_size=block_size, num_kv_heads=layout.num_layers * layout.num_kv_heads, head_size=layout.head_dim,
            dtype=layout.dtype, ratio=layout.compression.target_ratio, delay=layout.delay,
            step_tokens=vllm.scheduler_config.max_num_batched_tokens, page_slots=slots,
        )  # fmt: skip
        vllm.compilation_config.static_forward_context[LAYER_NAME] = CacheLayer(self.cache, spec)
        backend = choose_backend("auto", layout.dtype, layout.head_dim, slots, layout.device)
        self._attention = CacheAttention(cast(Any, self.cache), backend)
        self.view = model_view.view_of(model)
        use_backend_layers(self.view, backend)
        self._head = model_view.view_of(self.view)
        self._head.model = GivenStates()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embed tokens, [T, hidden]."""
        return self.view.get_input_embeddings()(input_ids)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Run the layers over a step's tokens, [T]; return their last hidden states, [T, hidden]."""
        steps = get_forward_context().attn_metadata
        asked = {"position_ids": positions[None].long(), "use_cache": False}
        if steps is None or not self.cache.is_told:  # vLLM measures the memory of a step, or warms up
            return self._run(input_ids, paged_cache=NoCache(), **asked)
        step: AttentionStep = steps[LAYER_NAME]
        batch = self.cache.batch(step.first_blocks, step.begins, step.num_new, step.most)
        paged = PagedForward(cast(Any, self.cache), self._attention, batch, self.causal_lm.rotary_tables)
        hidden = self._run(input_ids, paged_cache=paged, **asked)
        paged.finish()
        self.cache.end_step()
        return hidden

    def _run(self, input_ids: Tensor, **asked: Any) -> Tensor:
        hidden: Tensor = self.view.model(input_ids[None].long(), **asked).last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits of hidden states [n, hidden], [n, vocab], as the family's own head makes them."""
        logits: Tensor = self._head(inputs_embeds=hidden_states[None]).logits[0]
        return logits


class GivenStates(nn.Module):
    """Stands before a head in place of the layers, whose result it is given."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> MoeModelOutputWithPast:
        """Return the given states, [B, T, hidden], as the last layer's."""
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


class NoCache:
    """Takes the cache's place where a step has no requests: attention returns zeros."""

    def attend(self, layer_index: int, tokens: Any, *_: Any) -> Tensor:
        """See `CompressedCache.attend`."""
        return torch.zeros_like(tokens.query)
