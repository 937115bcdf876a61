"""What vLLM calls in each of its processes, by the entry point `vllm.general_plugins`."""

from __future__ import annotations

import itertools

from vllm import ModelRegistry
from vllm.config import KVTransferConfig, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

from dmc.compression.full_attention import layer_windows
from dmc.models.families import FAMILIES
from dmc.models.weights import check_weights

logger = init_logger(__name__)


def register() -> None:
    """Let vLLM know the exported families, and how to serve them. May be called again."""
    for family in FAMILIES.values():
        ModelRegistry.register_model(family.__name__, "dmc.vllm.model:DMCForCausalLM")
        MODELS_CONFIG_MAP[family.__name__] = CompressedModelConfig


class CompressedModelConfig(VerifyAndUpdateConfig):
    """Settings of vLLM that a model with learned gates needs."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Choose our connector, no prefix cache and no graphs, before any weight is read.

        Raises:
            NotImplementedError, RuntimeError: see `check_model` and `check_settings`.
        """
        check_model(vllm_config)
        check_settings(vllm_config)
        if vllm_config.cache_config.enable_prefix_caching:
            logger.warning("prefix caching is off: entries of a compressed cache depend on all tokens before them")
            vllm_config.cache_config.enable_prefix_caching = False
        vllm_config.model_config.enforce_eager = True
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="DMCConnector", kv_connector_module_path="dmc.vllm.connector", kv_role="kv_producer"
        )


def check_model(vllm_config: VllmConfig) -> None:
    """Refuse folders whose models this part cannot serve.

    Raises:
        NotImplementedError: a layer has a window, or no attention.
        RuntimeError: see `check_weights`.
    """
    config = vllm_config.model_config.hf_config
    if other := [index for index, window in enumerate(layer_windows(config)) if window is not None]:
        raise NotImplementedError(
            f"layer {other[0]} of this {config.model_type} model does not attend to all tokens, as all must to be "
            "served in vLLM: use dmc's engine"
        )
    try:
        check_weights(vllm_config.model_config.model)
    except (ValueError, FileNotFoundError) as error:
        raise RuntimeError(str(error)) from None  # a ValueError would be wrapped into lines of vLLM's own


def check_settings(vllm_config: VllmConfig) -> None:
    """Refuse settings that a compressed cache cannot serve.

    Raises:
        NotImplementedError: one is set.
    """
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    quantization = vllm_config.model_config.quantization
    refused = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1,
        "LoRA": vllm_config.lora_config is not None,
        f"kv_cache_dtype={cache.cache_dtype!r}": cache.cache_dtype != "auto",
        f"quantization={quantization!r}": quantization is not None,
        "a kv_connector of your own": vllm_config.kv_transfer_config is not None,
    }
    for name in itertools.compress(refused, refused.values()):
        raise NotImplementedError(f"a model with learned gates is not served with {name}: leave it out")
