"""The settings with which a run communicates and recomputes least, and how large its micro-batch then is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from dmc.training.config import RunConfig
from dmc.training.planning.peak_memory import Memory
from dmc.training.planning.start_checks import model_shape
from dmc.training.recompute import Recompute

HEADROOM = 0.1
"""Share of a device's memory that a proposal leaves free."""
# Assumed rates, of an H100's data sheet or of nothing better: they rank layouts, and predict no time.
IN_NODE, BETWEEN_NODES = 450e9, 50e9
"""Assumed bytes per second that a GPU sends: NVLink, and an adapter of 400 Gb/s. Their ratio decides."""
PRODUCTS, MEMORY = 400e12, 2.7e12
"""Assumed operations of matrix products and bytes per second that a GPU does in bfloat16."""
RECOMPUTED: dict[Recompute, float] = {False: 0.0, "selective": 0.2, True: 1.0}
"""Share of a forward pass that is computed again; of a layer without its products and attention it is assumed."""
LAUNCHES, LAUNCH = {False: 381, True: 106}, 8e-6
"""Kernels that a pass launches for each layer, compiled or not (`benchmarks/training_bytes.py`), and the host's assumed
seconds for one: passes of few tokens wait for it."""
MARGIN = 0.05
"""Share of a step's assumed seconds that a proposal must save where the run fits as it is."""
BYTES_OF_A_PASS = 18
"""For each trained weight: it is cast, and its gradient added to the sum, in float32."""
FIXED = ("weights", "gradients", "optimizer states", "teacher", "gathered weights", "gradients on their way", "buckets")
"""Components that do not grow with the micro-batch."""
OF_TRAINING = ("activation_checkpointing", "micro_batch_size")
"""What of a layout is in `training`, and not in `trainer`."""


@dataclass(frozen=True)
class Layout:
    """What a proposal may change; the model that is trained, and its batch, stay."""

    strategy: str
    shard_size: int | None
    accumulate_locally: bool
    activation_checkpointing: Recompute
    micro_batch_size: int

    @classmethod
    def of(cls, config: RunConfig) -> Layout:
        """Read that of a run."""
        trainer = config.trainer
        given = config.training.activation_checkpointing, config.training.micro_batch_size
        return cls(trainer.strategy, trainer.shard_size, trainer.accumulate_locally, *given)

    def of_run(self, config: RunConfig) -> RunConfig:
        """Give a run that differs in this."""
        values = dataclasses.asdict(self)
        training = dataclasses.replace(config.training, **{name: values.pop(name) for name in OF_TRAINING})
        return dataclasses.replace(config, training=training, trainer=dataclasses.replace(config.trainer, **values))

    def settings(self, before: Layout) -> list[str]:
        """List what differs from another one, as on the command line."""
        changed = []
        for name, value in dataclasses.asdict(self).items():
            if value != getattr(before, name):
                group = "training" if name in OF_TRAINING else "trainer"
                changed.append(f"{group}.{name}={'null' if value is None else str(value).lower()}")
        return changed


@dataclass(frozen=True)
class Proposal:
    """Better settings than those of a run."""

    settings: list[str]
    """What to add to the command."""
    memory: Memory
    passes: int
    """Micro-batches of each rank for one optimizer step; divided weights are gathered for each of them."""


def propose(
    config: RunConfig, num_local: int, device_bytes: float, memory: Memory, measure: Callable[[RunConfig], Memory]
) -> Proposal | None:
    """Find settings with less communication and computation, then with fewer passes, that fit with `HEADROOM`.

    What is proposed has been traced; what is left out has been estimated from peaks traced at two micro-batches or more
    (see `_Peaks`), so that a larger micro-batch that fits is never missed.

    Args:
        config: the run.
        num_local: devices of a node.
        device_bytes: memory of one device.
        memory: of the run.
        measure: traces the memory of a run.
    Returns:
        None: the run's own settings are the best, or nothing fits.
    """
    current, limit = Layout.of(config), device_bytes * (1 - HEADROOM)
    given = num_local, model_shape(config).num_hidden_layers, memory
    layouts = sorted(_layouts(config, num_local), key=lambda layout: cost(layout.of_run(config), *given))
    sizes = sorted({layout.micro_batch_size for layout in layouts})
    peaks = {how: _Peaks(config, num_local) for how in RECOMPUTED}
    peaks[current.activation_checkpointing].add(current, memory)
    traced = {current: memory}

    def fits(layout: Layout) -> bool:
        if layout == current:
            return memory.total <= device_bytes
        of_mode = peaks[layout.activation_checkpointing]
        return (traced[layout].total if layout in traced else of_mode.estimate(layout)) <= limit

    while (best := next(filter(fits, layouts), None)) is not None:
        of_mode = peaks[best.activation_checkpointing]
        if best in traced:
            place = sizes.index(best.micro_batch_size)
            if of_mode.is_known or len(sizes) == 1:
                larger = dataclasses.replace(best, micro_batch_size=sizes[min(place + 1, len(sizes) - 1)])
                if larger in traced or not of_mode.may_be_less(larger):
                    break
                best = larger
            else:
                best = dataclasses.replace(best, micro_batch_size=sizes[place - 1 if place else 1])
        traced[best] = measure(best.of_run(config))
        of_mode.add(best, traced[best])
    if best is None or best == current:
        return None
    seconds = {layout: cost(layout.of_run(config), *given)[0] for layout in (current, best)}
    if memory.total <= device_bytes and seconds[best] > (1 - MARGIN) * seconds[current]:
        return None
    return Proposal(best.settings(current), traced[best], _passes(best.of_run(config), num_local))


class _Peaks:
    """Peaks over the micro-batch, of which some are traced, of layouts that recompute alike: they differ in the states.

    A peak is the largest of several straight lines over the micro-batch. So the line through two traced ones is never
    too low between them, and never too high beyond them.
    """

    def __init__(self, config: RunConfig, num_local: int) -> None:
        self._config, self._num_local = config, num_local
        self._totals: dict[int, float] = {}

    @property
    def is_known(self) -> bool:
        """Whether there are two."""
        return len(self._totals) > 1

    def may_be_less(self, layout: Layout) -> bool:
        """Whether an estimate lies between two traced peaks."""
        return layout.micro_batch_size < max(self._totals)

    def add(self, layout: Layout, memory: Memory) -> None:
        """Take down a traced peak."""
        self._memory = memory
        self._totals[layout.micro_batch_size] = memory.total - self._held(layout)

    def estimate(self, layout: Layout) -> float:
        """Estimate a peak; where none is traced, so low that one will be."""
        if not self._totals:
            return 0.0
        size, sampled = layout.micro_batch_size, sorted(self._totals)
        if not self.is_known:  # all that grows does so in proportion, which is too much
            grows = sum(value for name, value in self._memory.components.items() if name not in FIXED)
            return self._totals[sampled[0]] + grows * (size / sampled[0] - 1) + self._held(layout)
        place = next((place for place, sample in enumerate(sampled) if sample > size), len(sampled))
        below, above = sampled[(place := min(max(place, 1), len(sampled) - 1)) - 1], sampled[place]
        slope = (self._totals[above] - self._totals[below]) / (above - below)
        return self._totals[below] + slope * (size - below) + self._held(layout)

    def _held(self, layout: Layout) -> float:
        """Bytes of weights, gradients and Adam's states on a rank."""
        run = layout.of_run(self._config)
        _, shard, tensor = run.trainer.mesh(self._num_local)
        stored = 2 if run.dtype == "bfloat16" else 4
        divided = stored * (self._memory.num_weights + 2 * self._memory.num_trained) / shard
        gradients = 4 * self._memory.num_trained / (1 if run.trainer.accumulate_locally else shard)
        return (divided + gradients) / tensor


def _layouts(config: RunConfig, num_local: int) -> list[Layout]:
    """List a run's own layout, and those it may have instead; of equal ones the first is taken."""
    current = Layout.of(config)
    layouts = [current]
    if current.strategy in ("fsdp2", "hsdp"):
        if config.trainer.num_nodes > 1:
            layouts += [
                dataclasses.replace(current, strategy=strategy, shard_size=None) for strategy in ("hsdp", "fsdp2")
            ]
        layouts += [dataclasses.replace(layout, accumulate_locally=not layout.accumulate_locally) for layout in layouts]
    per_rank = config.training.batch_size // _num_ranks(config, num_local)
    sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
    hows = (current.activation_checkpointing, *RECOMPUTED)
    layouts = [dataclasses.replace(layout, activation_checkpointing=how) for layout in layouts for how in hows]
    found = [dataclasses.replace(layout, micro_batch_size=size) for layout in layouts for size in sizes]
    return list(dict.fromkeys([current, *found]))


def _num_ranks(config: RunConfig, num_local: int) -> int:
    """Data parallel ranks."""
    return num_local * config.trainer.num_nodes // config.trainer.devices_per_sequence


def _passes(config: RunConfig, num_local: int) -> int:
    return config.training.accumulation(_num_ranks(config, num_local))


def cost(config: RunConfig, num_local: int, num_layers: int, memory: Memory) -> tuple[float, int]:
    """Return the assumed seconds that a rank sends and computes in a step, if nothing hides another, and its passes.

    Weights are gathered for forward and for backward, a teacher's for forward; gradients are float32.
    """
    trainer, passes = config.trainer, _passes(config, num_local)
    copies, shard, tensor = trainer.mesh(num_local)
    computed = 2 if "bfloat16" in (config.dtype, trainer.precision.replace("bf16-mixed", "bfloat16")) else 4
    gathered = computed * memory.num_weights * (2 if config.distillation is None else 3) / tensor
    gradients = 4 * memory.num_trained / tensor
    sent = passes * gathered + (1 if trainer.accumulate_locally else passes) * gradients
    seconds = (1 - 1 / shard) * sent / (IN_NODE if shard * tensor <= num_local else BETWEEN_NODES)
    seconds += 2 * (1 - 1 / copies) * gradients / shard / (IN_NODE if trainer.num_nodes == 1 else BETWEEN_NODES)
    tokens = config.training.tokens_per_step / _num_ranks(config, num_local) / passes
    again = RECOMPUTED[config.training.activation_checkpointing]
    if trainer.compiles_layers:  # its compiler computes what is cheap again of itself
        again = max(again, RECOMPUTED["selective"])
    units = 3 + again
    works = units * 2 * memory.num_weights * tokens / tensor / PRODUCTS
    works += BYTES_OF_A_PASS * memory.num_trained / shard / tensor / MEMORY
    return seconds + passes * max(works, num_layers * LAUNCHES[trainer.compiles_layers] * LAUNCH), passes
