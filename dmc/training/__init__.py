"""Training: the Lightning module, its stages, and the callbacks of a run."""

from dmc.training.callbacks.preemption import EXIT_PREEMPTED, PreemptedError
from dmc.training.callbacks.step_metrics import NonFiniteError
from dmc.training.exporter import export_checkpoint
from dmc.training.planning.planner import print_plan
from dmc.training.run import TrainedRun, train
from dmc.training.text_data import prepare_text

__all__ = [
    "EXIT_PREEMPTED",
    "NonFiniteError",
    "PreemptedError",
    "TrainedRun",
    "export_checkpoint",
    "prepare_text",
    "print_plan",
    "train",
]
