"""PyramidKV (arXiv:2406.02069): SnapKV with budgets that fall from layer to layer."""

from __future__ import annotations

from dmc.config.settings import Count, Ratio, checked_dataclass
from dmc.policies.budgets import Decay, effective_window, pyramid, stepped_down
from dmc.policies.snapkv import SnapKV


@checked_dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """Keep SnapKV's entries, most in the first layer and fewest in the last, k^l = k^0 - l (k^0 - k^(m-1)) / (m - 1).

    Differs from the authors' code: budgets are rounded so that their total is exact, and are uniform where the pyramid
    would not fit. `official_floor` rounds as they do, and holds more than its nominal size.
    """

    window: Count = 8
    """Last queries that are observed, whose tokens stay ("alpha" in the paper); at most half of the budget."""
    beta: Ratio = 20.0
    """The last layer gets average / beta beside the window; 1 is SnapKV."""
    decay: Decay = "linear"
    """How budgets fall from the first layer to the last: see `dmc.policies.budgets.pyramid`."""
    official_floor: bool = False
    """Whether the step from layer to layer is rounded down, as in the authors' code."""

    def layer_budgets(self, weights: list[float], limit: int, num_layers: int, tokens_seen: int) -> list[int]:
        """The pyramid beside the window."""
        window = effective_window(self.window, limit)
        average, candidates = limit - window, tokens_seen - window
        if self.official_floor:
            budgets = stepped_down(average, num_layers, self.beta, candidates)
        else:
            budgets = pyramid(average, num_layers, self.beta, candidates, self.decay)
        return [window + budget for budget in budgets[: len(weights)]]
