"""The plot of a front: accuracy in every budget, a line for each family, and all settings as points."""

from __future__ import annotations

from dmc.results.drawing import DIM, FRONT, FULL, GATES, Plot, log_axis, new_plot
from dmc.results.fronts import COSTS, FAMILIES, Front

MILLION = 1e6
COLORS = dict(zip(FAMILIES, (FULL, GATES, FRONT), strict=True))


def draw_front(front: Front) -> Plot:
    """Draw the accuracy of each family over the budgets of a whole problem."""
    cost, budgets = COSTS[front.cost], front.budgets / MILLION
    caption = (
        "Lines: the most accurate setting of a family that costs no more, chosen on the other half of the problems."
    )
    with new_plot(f"{front.task}: right answers over {cost}", f"{caption} Points: all settings.") as plot:
        for family in front.families:
            values = front.right(family).mean((1, 2))
            plot.axes.step(budgets, values, where="post", color=COLORS[family], linewidth=1.6)
            plot.cover([*zip(budgets.tolist(), values.tolist(), strict=True)])
            place = len(budgets) // 4
            plot.labels.append((float(budgets[place]), float(values[place]), family, COLORS[family]))
        for setting in front.settings:
            value = float(setting.right.mean())
            color = COLORS[setting.family]
            marker = {FULL: "s", GATES: "D"}.get(color, "o")
            spot = setting.cost / MILLION, value
            (mark,) = plot.axes.plot(*spot, marker, color=color, markersize=4.5, markeredgewidth=0)
            plot.tip(mark, setting.title, f"{setting.title}: {value:.1%}, {setting.cost:,.0f} bytes")
            if setting.family == FAMILIES[-1]:
                mark.set_color(DIM)
            plot.cover([spot])
        plot.axes.set(xlabel=f"{cost}, in millions", ylabel="right answers", ylim=(0, 1.08))
        log_axis(plot.axes, [setting.cost / MILLION for setting in front.settings])
    return plot
