import itertools

import pytest
from covering import cover

AXES = [["a", "b", "c"], [None, {}], list(range(7)), [False, True], ["x", "y", "z", "w"]]


def pairs_of(rows):
    return {((i, str(row[i])), (j, str(row[j]))) for row in rows for i, j in itertools.combinations(range(len(row)), 2)}


def test_every_pair_of_values_stands_in_a_row():
    rows = cover(*AXES)
    assert pairs_of(rows) == pairs_of(itertools.product(*AXES))
    assert len(rows) < 1.5 * 28  # the two longest axes need 28; the product has 336


def test_pairs_that_rows_allow_stand_in_rows_that_are_allowed():
    def allowed(a, b, c, d, e):
        return not (a == "a" and d) and not (c > 3 and e == "x")

    rows = cover(*AXES, allowed=allowed)
    assert all(itertools.starmap(allowed, rows))
    assert pairs_of(rows) == pairs_of(row for row in itertools.product(*AXES) if allowed(*row))


def test_the_same_axes_give_the_same_rows():
    assert cover(*AXES) == cover(*AXES)


@pytest.mark.parametrize("axes", [[], [[1, 2]], [[1], []]])
def test_axes_that_have_no_pairs_are_refused(axes):
    with pytest.raises(ValueError, match="expected two axes or more"):
        cover(*axes)


def test_a_rule_that_allows_no_row_is_refused():
    with pytest.raises(ValueError, match="no row is allowed"):
        cover([1, 2], [3], allowed=lambda a, b: False)
