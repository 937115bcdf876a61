"""Small pure functions that several methods share: what is highest, pooling, shares under a cap."""

from fractions import Fraction

Number = float | Fraction


def highest(scores, count):
    """Ascending indices of the `count` highest scores; among equals the smaller index wins."""
    return sorted(sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:count])


def choose(scores, count, protected, safe):
    """Ascending indices of `count` entries: the protected, then the safe, the first of each first, then the highest."""

    def preference(index):
        if index in protected or index in safe:
            return (0 if index in protected else 1), 0, index
        return 2, -scores[index], index

    return sorted(sorted(range(len(scores)), key=preference)[:count])


def heavy_and_recent(scores, heavy, recent, sinks=0, protected=()):
    """Keep the last `recent` entries and `heavy` of those before: the first `sinks`, then the highest scores."""
    safe = {*range(sinks), *range(len(scores) - recent, len(scores))}
    return choose(scores, heavy + recent, protected, safe)


def pool(scores, kernel_size, pooling):
    """Slide a window over the scores: stride 1, same length; an average divides by `kernel_size` at the borders too."""
    pooled = []
    for centre in range(len(scores)):
        inside = scores[max(0, centre - kernel_size // 2) : centre + kernel_size // 2 + 1]
        pooled.append(max(inside) if pooling == "max" else sum(inside) / kernel_size)
    return pooled


def window_within(window, budget):
    """Size of an observation window that leaves half of a small budget to other entries."""
    return min(window, max(1, budget // 2))


def share_out(weights, total, cap):
    """Share `total` in proportion to the weights, none above `cap`: what is cut off goes to the others, likewise."""
    capped = set()
    while True:
        free = [index for index in range(len(weights)) if index not in capped]
        rest = total - cap * len(capped)
        weight = sum(weights[index] for index in free)
        shares = [
            cap if index in capped else rest * weights[index] / weight if weight else rest / len(free)
            for index in range(len(weights))
        ]
        above = {index for index in free if shares[index] > cap}
        if not above:
            return shares
        capped |= above
