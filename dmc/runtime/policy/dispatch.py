"""Which attention runs a policy, and what the cache keeps for it: the one place that knows all kinds of policies."""

from __future__ import annotations

from types import ModuleType

from dmc.policies import CachePolicy, EvictionPolicy, InfLLM, OmniKV, Quest
from dmc.runtime.cache_attention import CacheAttention
from dmc.runtime.paged_cache import PagedCache
from dmc.runtime.policy.eviction import Eviction, note_layout
from dmc.runtime.policy.infllm import InfLLMAttention
from dmc.runtime.policy.infllm_memory import BlockMemoryLayout
from dmc.runtime.policy.omnikv import OmniKVAttention
from dmc.runtime.policy.omnikv_offload import OffloadedOmniKV
from dmc.runtime.policy.omnikv_store import OmniKVLayout
from dmc.runtime.policy.quest import PageBoundsLayout, QuestAttention
from dmc.runtime.side_store import SideLayout
from dmc.runtime.step import RotaryTables


def side_layout(policy: CachePolicy, num_kv_heads: int, head_dim: int) -> SideLayout:
    """Say what the cache keeps for a policy beside keys and values.

    Raises:
        TypeError: it is no policy.
    """
    if isinstance(policy, EvictionPolicy):
        return note_layout(policy, num_kv_heads, head_dim)
    if isinstance(policy, OmniKV):
        return OmniKVLayout(policy)
    if isinstance(policy, Quest):
        return PageBoundsLayout(policy.page_size)
    if isinstance(policy, InfLLM):
        return BlockMemoryLayout(policy.initial, policy.block_size)
    raise TypeError(f"policy={policy!r}: expected an object such as dmc.policies.H2O(budget=Budget(ratio=4.0))")


def policy_attention(
    policy: CachePolicy, cache: PagedCache, backend: ModuleType, rotary: RotaryTables
) -> CacheAttention:
    """Return what attends for a policy.

    Args:
        policy: fitted to the model.
        cache: storage, with the policy's side store.
        backend: kernel module.
        rotary: position ids [S, n] -> cos, sin [S, n, D], with which keys are turned further.
    """
    if isinstance(policy, EvictionPolicy):
        return Eviction(cache, backend, policy, rotary)
    if isinstance(policy, Quest):
        return QuestAttention(cache, backend, policy)
    if isinstance(policy, InfLLM):
        return InfLLMAttention(cache, backend, policy, rotary)
    assert isinstance(policy, OmniKV)
    return (OffloadedOmniKV if policy.offload else OmniKVAttention)(cache, backend, policy)
