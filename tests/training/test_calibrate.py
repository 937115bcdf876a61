import dataclasses

import pytest
import torch
from conftest import mixed_gates, open_adapters
from runtime.test_windows import hybrid

from dmc import retrofit
from dmc.compression import GateTrace
from dmc.models.masked_attention import Documents
from dmc.ranks import Ranks
from dmc.training import calibrate
from dmc.training.calibrate import MAX_PASSES, calibrate_offset
from dmc.training.logit_histogram import LogitHistogram
from dmc.training.measure import score_text

NUM_TOKENS = 128
DROP = {"action": "drop"}
DECIDED = {"target_counts": "decided"}


def random_batches(num_tokens=40):
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(83, (2, num_tokens), generator=generator)} for _ in range(3)]


@pytest.fixture
def batches():
    return random_batches()


def with_offset(model, offset):
    model.compression = dataclasses.replace(model.compression, decision_offset=offset)
    return model


def held_share(model, batches):
    """Naive: token by token, the mean over sequences and heads of what no decision that counts merges or drops."""
    gates, shares = model.compression, []
    delay = gates.delay if gates.target_counts == "held" else 0
    for batch in batches:
        trace = GateTrace()
        with torch.no_grad():
            model(batch["input_ids"], use_cache=False, gate_trace=trace, documents=batch.get("documents"))
        for logits in trace.logits.values():
            for row, of_heads in enumerate(logits):
                real = batch.get("token_mask", torch.ones_like(batch["input_ids"]))[row].nonzero()[:, 0].tolist()
                starts = set(batch["documents"].starts[row].nonzero()[:, 0].tolist()) if "documents" in batch else set()
                counted = [t for t in real[1 : len(real) - delay] if t not in starts]
                shares += [1 - sum(head[t] > 0 for t in counted) / len(real) for head in of_heads.tolist()]
    return sum(shares) / len(shares)


def bisected(model, batches, target_ratio):
    """Naive: halve an interval of offsets with a pass over the text each time; the share nearest to the target's."""
    low, high, found = -10 * model.compression.decision_scale, 10 * model.compression.decision_scale, []
    for _ in range(16):
        offset = (low + high) / 2
        found.append(held_share(with_offset(model, offset), batches))
        low, high = (offset, high) if found[-1] < 1 / target_ratio else (low, offset)
    return min(found, key=lambda held: abs(held - 1 / target_ratio))


@pytest.mark.parametrize(
    ("family", "gates", "target"),
    [
        ("llama", {}, 2.0),
        ("llama", DROP | DECIDED | {"delay": 16, "gate_input": "hidden"}, 8.0),
        ("llama", DROP | {"delay": 4, "gate_input": "query", "decision_scale": 20.0}, 4.0),
        ("llama", DECIDED | {"gate_input": "both", "window_size": None, "decision_scale": 100.0}, 16.0),
        ("gemma3_text", DROP | {"delay": 4, "gate_input": "hidden"}, 4.0),
        ("gpt_oss", DECIDED | {"delay": 8, "decisions": "per_layer"}, 2.0),
    ],
)
def test_five_passes_find_what_bisection_finds(make_compressed, family, gates, target):
    def build():
        if family == "llama":
            return make_compressed(gates=gates)
        return open_adapters(retrofit(hybrid(family), mixed_gates(**gates)))

    model, batches, num_read = build(), random_batches(NUM_TOKENS), []
    model.register_forward_hook(lambda *_: num_read.append(1))
    found = calibrate_offset(model, batches, target)
    assert found.num_passes == len(num_read) / len(batches) <= MAX_PASSES
    held = held_share(model, batches)
    assert found.ratio == pytest.approx(1 / held, rel=1e-5)
    assert abs(held - 1 / target) <= max(0.002, abs(bisected(build(), batches, target) - 1 / target))


@pytest.mark.parametrize("counts", ["held", "decided"])
def test_a_pass_tells_what_any_offset_would_hold_where_no_layer_follows(make_compressed, counts):
    model = make_compressed(gates={"delay": 3, "target_counts": counts}, num_layers=1)
    starts = torch.rand(2, 40, generator=torch.Generator().manual_seed(2)) < 0.1
    batches = random_batches()
    batches[1] |= {"token_mask": torch.arange(40).expand(2, -1) < torch.tensor([[24], [37]])}
    batches[2] |= {"documents": Documents.from_starts(starts)}
    histogram = LogitHistogram(0.1)
    score = score_text(model, batches, histogram=histogram)
    ratio = score.achieved_ratio if counts == "held" else score.decided_ratio
    assert histogram.share_at(0.1) == pytest.approx(1 / ratio)
    for offset in (-9.0, -1.3, -0.2, 0.1, 0.4, 2.0, 9.0):
        assert histogram.share_at(offset) == pytest.approx(held_share(with_offset(model, offset), batches), abs=2e-4)
    for share in (0.0, 0.3, 0.55, 0.9, 1.0):
        offset = histogram.offset_for(share)
        assert held_share(with_offset(model, offset), batches) == pytest.approx(histogram.share_at(offset), abs=1e-6)
        assert abs(histogram.share_at(offset) - max(share, histogram.share_at(-99.0))) < 0.01  # one decision of 240
    with_offset(model, 0.1)
    assert calibrate_offset(model, batches, 1 / histogram.share_at(-0.3)).num_passes == 2


def test_a_logit_on_the_threshold_holds_its_token_and_others_keep_their_order():
    numbers = torch.tensor([-torch.inf, -3e4, -1.0, -1e-3, -0.0, 0.0, 1e-30, 1e-3, 1.0, 40.0])
    histogram = LogitHistogram(5.0)
    histogram.add(numbers.view(1, 1, 1, -1), torch.ones(1, 10, dtype=torch.bool), torch.tensor([10]))
    for offset, held in ((-1e5, 1), (5.0 - 1.1, 2), (4.9, 3), (5.0, 6), (5.01, 8), (6.1, 9), (90.0, 10)):
        assert histogram.share_at(offset) == pytest.approx(held / 10)
        assert histogram.share_at(histogram.offset_for(held / 10)) == pytest.approx(held / 10)
    assert histogram.offset_for(0.9) == pytest.approx(5 + (1 + 40) / 2, rel=1e-3)  # far from either logit


def test_ranks_that_each_read_a_part_find_the_same_offsets():
    generator = torch.Generator().manual_seed(0)
    logits, decided = torch.randn(3, 4, 2, 30, generator=generator), torch.rand(4, 30, generator=generator) < 0.8
    lengths = torch.tensor([30, 7, 11, 23])
    whole, parts = LogitHistogram(0.0), [LogitHistogram(0.0) for _ in range(2)]
    whole.add(logits, decided, lengths)
    for number, part in enumerate(parts):
        rows = slice(2 * number, 2 * number + 2)
        part.add(logits[:, rows], decided[rows], lengths[rows])

    class Pair(Ranks):
        def all_reduce(self, value, op="sum"):
            return value + (parts[1].total if isinstance(value, int) else parts[1].weights)

    parts[0].all_reduce(Pair())
    assert torch.equal(parts[0].weights, whole.weights) and parts[0].total == whole.total


def test_shares_that_jump_whatever_the_offset_end_the_search_at_the_nearest_pass(make_compressed, monkeypatch, batches):
    model, asked = make_compressed(), []

    def scored(model, batches, sharing, histogram):
        offset = model.compression.decision_offset
        asked.append(offset)
        histogram.add(torch.linspace(-1, 1, 50).view(1, 1, 1, -1), torch.ones(1, 50, dtype=bool), torch.tensor([50]))
        return dataclasses.replace(score, held=torch.tensor([[0.5 + 0.3 * (-1) ** len(asked)]]))

    score = score_text(model, batches)
    monkeypatch.setattr(calibrate, "score_text", scored)
    found = calibrate_offset(model, batches, 2.2)
    assert len(asked) == found.num_passes == MAX_PASSES
    assert found.ratio == pytest.approx(1 / 0.8)
    assert model.compression.decision_offset == found.offset in asked


@pytest.mark.parametrize(
    ("gates", "target"),
    [
        *(({"delay": 1}, target) for target in (1.2, 1.6, 2.0)),
        *(({"delay": 1, "decision_scale": 100.0, "target_counts": "decided"}, target) for target in (1.2, 8.0)),
        ({"delay": 16, "target_counts": "decided"}, 4.0),  # with 16 of 40 tokens raw no head holds less than 17
    ],
)
def test_calibration_meets_the_target_and_changes_no_weight(make_compressed, batches, gates, target):
    model = make_compressed(gates=gates)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    found = calibrate_offset(model, batches, target)
    score = score_text(model, batches)
    assert found.ratio == (score.decided_ratio if "target_counts" in gates else score.achieved_ratio)
    assert found.ratio == pytest.approx(target, rel=0.02)
    assert (found.after.achieved_ratio, found.after.decided_ratio) == (score.achieved_ratio, score.decided_ratio)
    assert score.achieved_ratio < score.decided_ratio
    assert model.compression.decision_offset == found.offset
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_unreachable_target_gives_the_nearest(make_compressed, batches):
    model = make_compressed(gates={"delay": 16})
    found = calibrate_offset(model, batches, 30.0)
    highest = score_text(
        with_offset(model, -50.0), batches
    ).achieved_ratio  # every token merged but the raw 16 and one slot
    assert found.ratio == found.after.achieved_ratio <= highest
    assert highest == pytest.approx(40 / 17, rel=1e-6)


def test_stock_models_cannot_be_calibrated(make_stock, batches):
    with pytest.raises(ValueError, match="has no gates to calibrate"):
        calibrate_offset(make_stock(), batches, 2.0)
