import pytest

from dmc.compression import target_ratio_at, zero_out_multiplier_at


@pytest.mark.parametrize(("step", "ratio"), [(0, 1), (1000, 2), (2000, 3), (3000, 4), (3001, 4), (10**6, 4)])
def test_ratio_rises_linearly_and_stays(step, ratio):
    assert target_ratio_at(step, target_ratio=4.0, ramp_steps=3000) == ratio


def test_ramp_is_linear_in_the_ratio_not_in_its_inverse():
    ratios = [target_ratio_at(step, target_ratio=4.0, ramp_steps=3) for step in range(4)]
    assert [1 - 1 / ratio for ratio in ratios] == pytest.approx([0, 0.5, 2 / 3, 0.75])


def test_no_ramp_is_immediate():
    assert target_ratio_at(0, target_ratio=8.0, ramp_steps=0) == 8.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": -1, "target_ratio": 4.0, "ramp_steps": 10}, "step=-1"),
        ({"step": 1, "target_ratio": 4.0, "ramp_steps": -10}, "ramp_steps=-10"),
        ({"step": 1, "target_ratio": 0.25, "ramp_steps": 10}, "target_ratio=0.25 is not a compression ratio"),
    ],
)
def test_impossible_ramps_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        target_ratio_at(arguments.pop("step"), **arguments)


@pytest.mark.parametrize(("step", "multiplier"), [(0, 1), (50, 0.75), (100, 0.5), (200, 0), (201, 0), (250, 0)])
def test_neuron_is_gone_after_four_fifths_of_the_zero_out_stage(step, multiplier):
    assert zero_out_multiplier_at(step, total_steps=250) == multiplier


def test_paper_ramp_takes_the_whole_stage():
    multipliers = [zero_out_multiplier_at(step, total_steps=250, ramp_fraction=1.0) for step in (0, 125, 249, 250)]
    assert multipliers == pytest.approx([1, 0.5, 1 / 250, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 0, "total_steps": 0}, "total_steps=0"),
        ({"step": 0, "total_steps": 10, "ramp_fraction": 0.0}, "ramp_fraction=0.0"),
        ({"step": 0, "total_steps": 10, "ramp_fraction": 1.5}, "ramp_fraction=1.5"),
        ({"step": -1, "total_steps": 10}, "step=-1"),
    ],
)
def test_impossible_zero_out_stages_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        zero_out_multiplier_at(arguments.pop("step"), **arguments)
