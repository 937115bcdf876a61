"""What vLLM calls in each of its processes, by the entry point `vllm.general_plugins`."""

from __future__ import annotations

from vllm import ModelRegistry
from vllm.config import KVTransferConfig, VllmConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

from dmc.models.families import FAMILIES


def register() -> None:
    """Let vLLM know the exported families, and how to serve them. May be called again."""
    for family in FAMILIES.values():
        ModelRegistry.register_model(family.__name__, "dmc.vllm.model:DMCForCausalLM")
        MODELS_CONFIG_MAP[family.__name__] = CompressedModelConfig


class CompressedModelConfig(VerifyAndUpdateConfig):
    """Settings of vLLM that a model with learned gates needs."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Choose our connector, no prefix cache and no graphs.

        Raises:
            ValueError: the settings ask for what is not served.
        """
        cache = vllm_config.cache_config
        refused = {
            "LoRA": vllm_config.lora_config is not None,
            f"kv_cache_dtype={cache.cache_dtype!r}": cache.cache_dtype != "auto",
            "a kv_connector of your own": vllm_config.kv_transfer_config is not None,
        }
        if asked := [name for name, is_asked in refused.items() if is_asked]:
            raise ValueError(f"a model with learned gates is not served with {asked[0]}: leave it out")
        cache.enable_prefix_caching = False
        vllm_config.model_config.enforce_eager = True
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="DMCConnector", kv_connector_module_path="dmc.vllm.connector", kv_role="kv_producer"
        )
