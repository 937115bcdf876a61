"""Tell how many requests a GPU holds: python scripts/plan.py model=meta-llama/Llama-2-7b-hf gpu=80 context=4096."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from dmc.config.command_line import script

GIB = 2**30


@script("plan")
def main(settings: DictConfig) -> None:
    if not settings.gpu > 0 or not settings.context > 0:
        raise ValueError(f"gpu={settings.gpu} context={settings.context}: expected GiB and tokens, both above 0")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from dmc import retrofit
    from dmc.compression import CompressionConfig
    from dmc.models.weights import read_model_config
    from dmc.runtime.capacity import capacities
    from dmc.runtime.runner import layout_of
    from dmc.runtime.step_time import DEVICES, decode_step

    if not isinstance(dtype := getattr(torch, settings.dtype, None), torch.dtype):
        raise ValueError(f"dtype={settings.dtype}: expected bfloat16, float16 or float32")
    name, folder = settings.model.path, Path(settings.model.path)
    is_local = folder.is_dir() or name.startswith(("/", ".", "~"))
    config = read_model_config(folder) if is_local else AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if getattr(config, "compression", None) is None:
            model = retrofit(model, CompressionConfig(action=settings.action, delay=settings.delay))
    weights = sum({id(each): each.numel() * each.element_size() for each in model.parameters()}.values())
    layout = layout_of(model).stored_as(settings.kv_cache_dtype)
    found = capacities(config, layout, weights, int(settings.gpu * GIB), settings.context, [*settings.ratios])
    print(f"{name}: weights {weights / GIB:.2f} GiB in {settings.dtype}, one GPU of {settings.gpu} GiB\n")
    print(f"| CR | bytes of {settings.context:,} tokens (MiB) | requests held at once | longest request (tokens) |")
    print("|---|---|---|---|")
    for each in found:
        print(f"| {each.ratio:g} | {each.request_bytes / 2**20:,.1f} | {each.requests:,} | {each.longest:,} |")
    print("\nEvery head is taken to hold as much; heads that differ need up to half a block more.\n")
    print("A decode step, eager / compiled / recorded as a CUDA graph / both: predicted from launches and bytes.\n")
    print("| CR | requests | reads (GiB) | " + " | ".join(f"{device.name} (ms)" for device in DEVICES) + " |")
    print("|---" * (3 + len(DEVICES)) + "|")
    for each in found:
        for requests in sorted({found[0].requests, each.requests} - {0}):
            sizes = weights, requests, settings.context, each.ratio
            steps = [decode_step(config, layout, *sizes, compiles) for compiles in (False, True)]
            ways = [(step, is_recorded) for is_recorded in (False, True) for step in steps]
            times = [" / ".join(f"{1e3 * step.seconds(device, way):,.1f}" for step, way in ways) for device in DEVICES]
            reads = (steps[0].weight_bytes + steps[0].cache_bytes) / GIB
            print(f"| {each.ratio:g} | {requests:,} | {reads:,.1f} | " + " | ".join(times) + " |")


if __name__ == "__main__":
    main()
