"""Forty slips that a reviewer could miss, four in each floor of `dmc`: what `plant_faults.py` plants.

They were chosen by reading `dmc` alone, before the tiers of the tests were.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

FLOORS = {
    "compression": ("compression",),
    "models": ("models",),
    "kernels": ("kernels",),
    "policies": ("policies",),
    "runtime": ("runtime",),
    "data": ("data",),
    "training": ("training",),
    "results": ("results",),
    "serving": ("serving",),
    "commands": ("config", "commands", "megatron"),
}
"""Folders of each floor, the same in `dmc` and in `tests`."""


@dataclass(frozen=True)
class Fault:
    """A change of one place in one file."""

    floor: str
    name: str
    file: str
    """Path in the checkout."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    harm: str
    """What a user suffers."""

    @property
    def digest(self) -> str:
        """Hash of the change."""
        return hashlib.sha256("\0".join((self.file, self.old, self.new)).encode()).hexdigest()[:12]

    def planted(self, source: str) -> str:
        """Return a file's text with the fault.

        Raises:
            ValueError: the old text does not occur exactly once.
        """
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text occurs {count} times in {self.file}: expected once; adapt it")
        return source.replace(self.old, self.new)


FAULTS = (
    Fault(
        "compression", "gradient_sign", "dmc/compression/accumulate.py",
        "grad = torch.cat([grad, -(grad * out).sum(-1, keepdim=True)], dim=-1)",
        "grad = torch.cat([grad, (grad * out).sum(-1, keepdim=True)], dim=-1)",
        "Without a window, decisions and importance learn from a wrong gradient; the loss stays plausible.",
    ),
    Fault(
        "compression", "delay_edge", "dmc/compression/losses.py",
        "(order <= length - delay)",
        "(order < length - delay)",
        "The last decided token counts as kept: ratios are reported, trained and calibrated too low.",
    ),
    Fault(
        "compression", "wrong_group", "dmc/compression/gates.py",
        "importance = query[..., self.neuron].float().view(batch, kv_heads, -1, length).mean(2)",
        "importance = query[..., self.neuron].float().view(batch, -1, kv_heads, length).mean(1)",
        "A KV head weighs its tokens by the queries of other groups.",
    ),
    Fault(
        "compression", "same_noise", "dmc/compression/relaxation.py",
        "return (seed * 1_000_003 + layer) % 2**63",
        "return (seed * 1_000_003) % 2**63",
        "All layers of a retrofit draw the same noise, so that their decisions are correlated.",
    ),
    Fault(
        "models", "neuron_refilled", "dmc/models/attention.py",
        "scale = compressor.neuron_scale(0.0, value)",
        "scale = compressor.neuron_scale(1.0, value)",
        "RoPE fills the removed neuron again: a model is trained and scored otherwise than it is served.",
    ),
    Fault(
        "models", "token_seen_twice", "dmc/models/masked_attention/blocked.py",
        "(recent > rows) | (recent <= rows - operands.lag)",
        "(recent > rows) | (recent < rows - operands.lag)",
        "With a delay, most queries see the token that enters the stream twice, raw and compressed.",
    ),
    Fault(
        "models", "reverse_gradient", "dmc/models/token_losses.py",
        "apart.sub_(mean[:, None]).mul_(share)",
        "apart.mul_(share)",
        "Reverse distillation follows a gradient that does not sum to zero over the words.",
    ),
    Fault(
        "models", "bias_of_every_rank", "dmc/models/tensor_parallel.py",
        """        states = nn.functional.linear(states, self.weight)
        dist.all_reduce(states)
        return states if self.bias is None else states + self.bias
""",
        """        states = nn.functional.linear(states, self.weight, self.bias)
        dist.all_reduce(states)
        return states
""",
        "Models with a bias behind attention give other logits on several ranks: it is added once for each.",
    ),
    Fault(
        "kernels", "page_edge_leak", "dmc/kernels/cpu.cpp",
        "for (int64_t i = (new_length + a_.block - 1) / a_.block; i < end; i++)",
        "for (int64_t i = new_length / a_.block + 1; i < end; i++)",
        "Evicting down to a page's edge loses a page for good: a server runs out of memory after hours.",
    ),
    Fault(
        "kernels", "sink_of_every_part", "dmc/kernels/triton/decode.py",
        "has_sink = in_group & (chunk == first)",
        "has_sink = in_group",
        "On a GPU, heads that are cut into parts count their sink once for each: long contexts decode wrong.",
    ),
    Fault(
        "kernels", "mean_of_squares", "dmc/kernels/probabilities.py",
        "squares += weights.mean(2).square().sum(2)",
        "squares += weights.square().mean(2).sum(2)",
        "Methods that rank by the spread of attention keep other entries of a prompt where heads share keys.",
    ),
    Fault(
        "kernels", "window_edge", "dmc/kernels/windows.py",
        "mask = (keys_at <= at) & (keys_at > at - window)",
        "mask = (keys_at <= at) & (keys_at >= at - window)",
        "Layers with a sliding window see one token too many in prompts, but not while generating.",
    ),
    Fault(
        "policies", "budget_rounded_up", "dmc/policies/budgets.py",
        "(num_tokens.double() / budget.ratio + ROUNDING).floor()",
        "(num_tokens.double() / budget.ratio + ROUNDING).ceil()",
        "While generating, heads hold more than their budget: comparisons at equal memory are none.",
    ),
    Fault(
        "policies", "last_turn_unprotected", "dmc/policies/protection.py",
        "if prompt[1] <= end]",
        "if prompt[1] < end]",
        "The bounds of the last turn, which holds the question, are evicted in spite of protect=.",
    ),
    Fault(
        "policies", "window_of_last_chunk", "dmc/policies/eviction.py",
        "window = new if state.window is None else torch.cat((state.window, new), dim=1)",
        "window = new",
        "Where a prompt's last chunk is short, fewer queries than window= decide what stays.",
    ),
    Fault(
        "policies", "window_leaks", "dmc/policies/scores.py",
        "entries.in_order(scores.masked_fill(last | ~entries.exists, nothing))",
        "entries.in_order(scores.masked_fill(~entries.exists, nothing))",
        "Pooling spreads the window's attention to itself over the tokens before it, which then always stay.",
    ),
    Fault(
        "runtime", "stop_cut_short", "dmc/runtime/text_stream.py",
        "for size in range(1, len(stop)) if",
        "for size in range(1, len(stop) - 1) if",
        "A stop string whose last letter comes in a token of its own is not met, and most of it is shown.",
    ),
    Fault(
        "runtime", "open_slot_shared", "dmc/runtime/paged_cache.py",
        "closed = (lengths - 1).clamp_min(0) // self.block_size",
        "closed = lengths.clamp_min(0) // self.block_size",
        "Forks at a page's edge merge tokens into one shared slot: conversations change each other.",
    ),
    Fault(
        "runtime", "equal_continuations", "dmc/runtime/sampling.py",
        "manual_seed((seed + index) % 2**64)",
        "manual_seed(seed % 2**64)",
        "With a seed, all n continuations of a prompt are the same: votes are unanimous.",
    ),
    Fault(
        "runtime", "preempted_last", "dmc/runtime/scheduler.py",
        "self.waiting.appendleft(youngest)",
        "self.waiting.append(youngest)",
        "A preempted request waits behind all that came later, and may starve under load.",
    ),
    Fault(
        "data", "padding_learned", "dmc/data/packing.py",
        "np.pad(self.scored, (0, num_added)),",
        'np.pad(self.scored, (0, num_added), mode="edge"),',
        "With whole documents the model learns to repeat the last token of each sequence.",
    ),
    Fault(
        "data", "same_epochs", "dmc/data/order.py",
        "np.random.default_rng([*self.keys, epoch])",
        "np.random.default_rng([*self.keys])",
        "Every epoch has the samples in the same order.",
    ),
    Fault(
        "data", "resumed_twice", "dmc/data/streaming.py",
        '"num_yielded": number + 1}',
        '"num_yielded": number}',
        "A resumed run on streamed text draws the last sample of each shard again.",
    ),
    Fault(
        "data", "prompt_end_learned", "dmc/data/encoding.py",
        '[stop - 1 for _, stop in encoded["offset_mapping"]]',
        '[stop for _, stop in encoded["offset_mapping"]]',
        "The last token of each prompt is trained on, and the last one of each answer is not.",
    ),
    Fault(
        "training", "weight_not_saved", "dmc/training/optimizer_step.py",
        '"ratio_weight": float(self.ratio_control.weight),',
        '"ratio_weight": float(self.training.ratio_weight),',
        "A resumed run forgets the controlled weight of its ratio loss, and leaves its ramp.",
    ),
    Fault(
        "training", "skipped_collective", "dmc/training/callbacks/preemption.py",
        "stops, requeue = self.hosts.all_reduce(torch.tensor(received, dtype=torch.int64)).tolist()",
        "stops, requeue = torch.tensor(received, dtype=torch.int64).tolist()",
        "Where a signal reaches one rank alone, that one saves and the others wait until the job is killed.",
    ),
    Fault(
        "training", "snapshot_shifts_run", "dmc/training/export.py",
        "            model.compression = trained\n",
        "            model.compression = dataclasses.replace(model.compression, target_ratio=trained.target_ratio)\n",
        "After a snapshot, training goes on with the offset that the snapshot was calibrated to.",
    ),
    Fault(
        "training", "no_previous_checkpoint", "dmc/training/checkpoints.py",
        "and path not in (target, self.last):",
        "and path != target:",
        "There is only one checkpoint: if it is damaged, the run starts anew.",
    ),
    Fault(
        "results", "spread_of_seeds", "dmc/results/estimates.py",
        "float(numpy.var(self.by_seed, ddof=1))",
        "float(numpy.var(self.by_seed))",
        "Errors over few seeds are too small, so that chance differences are called real.",
    ),
    Fault(
        "results", "fewer_bytes", "dmc/results/statistics.py",
        "over.between(1, WHOLE_PAGES)",
        "over.between(1 / WHOLE_PAGES, WHOLE_PAGES)",
        "Baselines are compared with up to 13 % fewer bytes than the model, which favors the model.",
    ),
    Fault(
        "results", "chosen_on_same_half", "dmc/results/fronts.py",
        "setting.right[:, parity != half].mean()",
        "setting.right[:, parity == half].mean()",
        "Settings are chosen on the problems that they are reported on: the larger family gains.",
    ),
    Fault(
        "results", "repeats_equal", "dmc/results/harness.py",
        'f"{self.seed} {repeats[text]} {text}"',
        'f"{self.seed} {text}"',
        "Repeated samples of a benchmark's prompt are the same text, and pass@k is pass@1.",
    ),
    Fault(
        "serving", "special_stop_ignored", "dmc/serving/requests.py",
        '"stop_token_ids": (*request.stop_token_ids, *ends.values()),',
        '"stop_token_ids": tuple(request.stop_token_ids),',
        "A special token as a stop string does not stop: answers run on into the next turn.",
    ),
    Fault(
        "serving", "choices_collide", "dmc/serving/answers.py",
        "first_choice = job.index * request.n",
        "first_choice = job.index",
        "A stream of several prompts with n > 1 mixes texts of different prompts in one choice.",
    ),
    Fault(
        "serving", "failures_hold_places", "dmc/serving/worker.py",
        "            if isinstance(event, (Generation, APIError)):",
        "            if isinstance(event, Generation):",
        "Each failed request takes a place for ever: in the end the server answers 429 to everybody.",
    ),
    Fault(
        "serving", "no_key_needed", "dmc/serving/server.py",
        'request.scope["path"] in PUBLIC_PATHS:',
        'request.scope["path"].startswith(PUBLIC_PATHS):',
        "Every path begins like the page's, so that no request needs a key.",
    ),
    Fault(
        "commands", "misspelt_setting", "dmc/config/settings.py",
        'ConfigDict(extra="forbid", ',
        'ConfigDict(extra="ignore", ',
        "A misspelt setting is ignored, and the run has the default.",
    ),
    Fault(
        "commands", "control_left_out", "dmc/commands/study.py",
        "if config.only is None or name in (*config.only, CONTROL)]",
        "if config.only is None or name in config.only]",
        "A study of some runs compares them with nothing: only= leaves out the control.",
    ),
    Fault(
        "commands", "threshold_inverted", "dmc/megatron/convert.py",
        'gates["decision_scale"] * gates["omega_offset"] / gates["decision_offset"]',
        'gates["decision_scale"] * gates["decision_offset"] / gates["omega_offset"]',
        "A calibrated model that is exported to Megatron has another threshold, and another ratio.",
    ),
    Fault(
        "commands", "exact_becomes_window", "dmc/megatron/mapping.py",
        'arguments.get("dmc_window_size", 12) or None',
        'arguments.get("dmc_window_size", 12) or 12',
        "Gates that were trained to average whole segments are imported with a window of 12 tokens.",
    ),
)  # fmt: skip


def check_faults(root: Path) -> None:
    """Check that every fault applies to a checkout and leaves a file that Python can compile.

    Raises:
        ValueError: one does not; or a name is given twice, a floor has not four, or a file is of another floor.
    """
    counts = Counter(fault.floor for fault in FAULTS)
    if counts != dict.fromkeys(FLOORS, 4):
        raise ValueError(f"the floors have {dict(counts)} faults: expected 4 in each of {', '.join(FLOORS)}")
    for name, count in Counter(fault.name for fault in FAULTS).items():
        if count > 1:
            raise ValueError(f"{name} is the name of {count} faults: give each its own")
    for fault in FAULTS:
        if not fault.file.startswith(tuple(f"dmc/{folder}/" for folder in FLOORS[fault.floor])):
            raise ValueError(f"{fault.name}: {fault.file} is not in the floor {fault.floor}")
        if not (root / fault.file).is_file():
            raise ValueError(f"{fault.name}: {fault.file} does not exist: name the file that its code has moved to")
        source = fault.planted((root / fault.file).read_text())
        if fault.file.endswith(".py"):
            try:
                compile(source, fault.file, "exec")
            except SyntaxError as error:
                raise ValueError(f"{fault.name} leaves no Python in {fault.file}: {error}") from None


def check_cpp(root: Path) -> None:
    """Check that faults in C++ compile, if there is a compiler.

    Raises:
        ValueError: one does not.
    """
    if (compiler := shutil.which("c++")) is None:
        return
    for fault in FAULTS:
        if fault.file.endswith(".cpp"):
            command = [compiler, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
            source = fault.planted((root / fault.file).read_text())
            result = subprocess.run(command, input=source, capture_output=True, text=True)
            if result.returncode:
                raise ValueError(f"{fault.name} does not compile: {result.stderr.strip().splitlines()[0]}")
