"""Time how long a session's cache takes to be computed, saved and loaded; the model has random weights.

python benchmarks/carried_cache.py
python benchmarks/carried_cache.py --prompt_length 8192 --device cuda

The files are read right after they were written, from the memory in which the system keeps them. Checksums, and the
fingerprint of the model's weights, are part of saving and of loading.
"""

import argparse
import copy
import tempfile
from functools import partial
from pathlib import Path

import torch
from timings import SHAPE, Table, add_output_option, medians
from transformers import AutoConfig, AutoModelForCausalLM

from dmc import Engine, policies, retrofit
from dmc.budget import Budget
from dmc.compression import CompressionConfig


def engines(model: torch.nn.Module) -> dict[str, Engine]:
    """Build an engine for each kind of cache."""
    merging = CompressionConfig(decisions="fixed", weighting="uniform", target_ratio=4.0)
    return {
        "full cache": Engine(model),
        "full cache, 8 bits": Engine(model, kv_cache_dtype="int8"),
        "merging, CR 4": Engine(retrofit(copy.deepcopy(model), merging)),
        "SnapKV, CR 8": Engine(model, policy=policies.SnapKV(budget=Budget(ratio=8))),
    }


def prefill(engine: Engine, tokens: list[int]) -> None:
    """Compute the cache."""
    with engine.session() as session:
        session.feed(tokens)


def load(engine: Engine, folder: Path) -> None:
    """Read the cache."""
    engine.load(folder).close()


def main() -> None:
    """Print milliseconds of each kind of cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt_length", type=int, default=4096, help="tokens")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is timed")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="of the model")
    parser.add_argument("--device", default="cpu", help="device of the model")
    add_output_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE | {"num_hidden_layers": options.layers})).to(
        options.device
    )
    tokens = torch.randint(SHAPE["vocab_size"], (options.prompt_length,)).tolist()
    table = Table(__file__, options.output)
    for name, engine in engines(model).items():
        with tempfile.TemporaryDirectory() as place, engine.session() as session:
            session.feed(tokens)
            cases = {
                "prefill": partial(prefill, engine, tokens),
                "save": partial(engine.save, session, folder := Path(place) / "cache", overwrite=True),
                "load": partial(load, engine, folder),
            }
            found = medians(cases, options.rounds)
            size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
            table.add(f"{name}, {options.prompt_length} tokens, {size:.1f} MiB", found)


if __name__ == "__main__":
    main()
