import pytest

from dmc import Engine, SamplingParams
from dmc.results.synthetic_gates import set_synthetic_gates


@pytest.mark.parametrize("ratio", [1.0, 2.0, 4.0])
def test_the_cache_tends_to_the_ratio_and_heads_differ(ratio, make_compressed, make_prompts):
    model = make_compressed(group=1, num_layers=3)
    set_synthetic_gates(model, ratio)
    (generation,) = Engine(model).generate(make_prompts(2000), SamplingParams(max_new_tokens=2, temperature=0.0))
    assert generation.stats.achieved_ratio == pytest.approx(ratio, rel=0.05)
    if ratio > 1:
        slots = generation.stats.slots.float()
        assert (slots.amax(-1) / slots.amin(-1)).min() > 1.5


def test_ratios_below_one_are_refused(make_compressed):
    with pytest.raises(ValueError, match=r"ratio=0.5.*>= 1"):
        set_synthetic_gates(make_compressed(), 0.5)
