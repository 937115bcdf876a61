"""A compressed cache in vLLM's block pool; needs the extra `vllm`, and nothing else of `dmc` imports it."""
