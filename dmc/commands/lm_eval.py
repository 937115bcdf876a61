"""lm-eval's own command line, with the engine as a model and with compressed folders registered.

`python -m dmc.commands.lm_eval --model dmc --model_args pretrained=DIR,policy=h2o,ratio=4 --tasks piqa`, with all its
other options; `--model hf` runs a compressed folder through transformers.
"""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import Any

import torch
from lm_eval.api.registry import register_model

from dmc.budget import Budget
from dmc.config.command_line import errors_in_one_line
from dmc.config.folder import CONFIGS
from dmc.config.settings import build_config, suggest
from dmc.models.loading import load_with_tokenizer
from dmc.results.compare import memory_of
from dmc.results.grid import EngineSettings, named_settings
from dmc.results.harness import EngineLM
from dmc.results.policies import policy_from_config
from dmc.runtime import Engine


@register_model("dmc")
class FolderLM(EngineLM):
    """A model's folder on the engine, for lm-eval's command line: `--model dmc`.

    Args:
        pretrained: folder or hub name; a compressed model runs with its learned gates.
        policy: a file of `configs/policy`, or in JSON a mapping, `{"name": "mine", "_target_": "my_module.Mine"}`.
        ratio: budget of a policy, a compression ratio.
        tokens: budget of a policy in entries per KV head.
        dtype: dtype of the weights.
        revision: hub revision.
        seed: seed of sampled generations.
        batch_size: sequences that run at the same time; "auto": 8.
        device: device of the model; a missing GPU counts as the CPU.
        max_batch_size: ignored.
        options: `policy.NAME` for the policy, such as `policy.recent=32`; `engine.NAME`, see `EngineSettings`.
    Raises:
        ValueError: an argument is unknown or out of range; see `policy_from_config`, `EngineSettings` and `EngineLM`.
    """

    def __init__(
        self,
        pretrained: str,
        policy: str | dict[str, Any] = "full",
        ratio: float | None = None,
        tokens: int | None = None,
        dtype: str = "auto",
        revision: str | None = None,
        seed: int = 0,
        batch_size: int | str = 1,
        device: str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        budget = None if ratio is None and tokens is None else Budget(ratio=ratio, tokens=tokens)
        groups: dict[str, dict[str, Any]] = {"policy": {}, "engine": {}}
        for option, value in options.items():
            group, _, name = option.partition(".")
            if group not in groups or not name:
                known = [*signature(FolderLM).parameters, *(f"engine.{field.name}" for field in fields(EngineSettings))]
                raise ValueError(f"model_args: {option!r} is unknown; {suggest(option, known)}")
            groups[group][name] = value
        entry = {"name": policy, "like": policy} if isinstance(policy, str) else policy
        ((_, settings),) = named_settings([entry | groups["policy"]], CONFIGS / "policy", "policy").items()
        together = 8 if str(batch_size).startswith("auto") else int(batch_size)
        served = build_config(EngineSettings, {"max_batch_size": together, **groups["engine"]}, "engine")
        built = policy_from_config(settings, budget)  # before the model is loaded
        model, tokenizer = load_with_tokenizer(pretrained, dtype, revision)
        if device is not None and (torch.cuda.is_available() or not device.startswith("cuda")):
            model = model.to(device)
        self.budget, self.policy = budget, settings
        super().__init__(
            Engine(model, tokenizer, built, **vars(served)), requests_at_once=8 * served.max_batch_size, seed=seed
        )

    def get_model_info(self) -> dict[str, Any]:
        """Return the method and its memory, for the results file."""
        return {"policy": self.policy, "cache": memory_of(self.stats, self.budget) if self.stats else {}}


def main() -> None:
    """Run lm-eval with this process's arguments."""
    from lm_eval.__main__ import cli_evaluate

    with errors_in_one_line():
        cli_evaluate()


if __name__ == "__main__":
    main()
