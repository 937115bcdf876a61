import pytest
import torch

from dmc import SamplingParams
from dmc.runtime.sampling import sample_token

LOG_PROBS = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log()


def frequencies(count: int = 5_000, **settings: object) -> list[float]:
    params, generator = SamplingParams(**settings), torch.Generator().manual_seed(0)  # type: ignore[arg-type]
    drawn = torch.tensor([sample_token(LOG_PROBS, params, generator) for _ in range(count)])
    return (drawn.bincount(minlength=5) / count).tolist()


def test_zero_temperature_is_greedy() -> None:
    assert sample_token(LOG_PROBS, SamplingParams(temperature=0), None) == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"temperature": 0.5}, [0.035, 0.561, 0.009, 0.316, 0.079]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 99}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.5}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.75}, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
        ({"top_p": 1e-6}, [0, 1, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0, 0]),
    ],
)
def test_tokens_come_with_the_probabilities_asked_for(settings: dict, expected: list[float]) -> None:
    assert frequencies(**settings) == pytest.approx(expected, abs=0.025)


def test_a_seed_decides_the_draws() -> None:
    def draw(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [sample_token(LOG_PROBS, SamplingParams(), generator) for _ in range(30)]

    assert draw(3) == draw(3) != draw(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: expected a whole number >= 1"),
        ({"temperature": -0.1}, "temperature=-0.1: expected a number >= 0"),
        ({"temperature": float("nan")}, "temperature=nan: expected a number >= 0"),
        ({"top_k": 0}, "top_k=0: expected a whole number >= 1, or None"),
        ({"top_p": 0.0}, r"top_p=0.0: expected a number in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p=1.1"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)
