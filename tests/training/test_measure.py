import pytest
import torch

from dmc import Engine, SamplingParams
from dmc.compression import GateTrace
from dmc.training.measure import score_text


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(83, (2, 40), generator=generator)} for _ in range(3)]


@pytest.mark.parametrize("masked", [False, True])
def test_loss_is_the_mean_log_probability_of_the_tokens_that_are_scored(make_stock, batches, masked):
    model = make_stock()
    masks = [torch.rand(2, 40, generator=torch.Generator().manual_seed(i)) < 0.3 for i in range(3)]
    masks[1][0] = False  # a sequence without an answer is none of the mean's
    if masked:
        batches = [batch | {"loss_mask": mask} for batch, mask in zip(batches, masks, strict=True)]
    score = score_text(model, batches)
    losses = []
    for batch, mask in zip(batches, masks, strict=True):
        for row, scored in zip(batch["input_ids"], mask, strict=True):
            with torch.no_grad():
                logs = model(row[None], use_cache=False).logits[0].log_softmax(-1)[:-1].gather(-1, row[1:, None])[:, 0]
            losses += [-(logs[scored[1:]] if masked else logs).mean()] * bool(scored.any() or not masked)
    assert len(losses) == (5 if masked else 6)
    assert score.loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    assert score.achieved_ratio == 1
    with pytest.raises(ValueError, match="no token of 2 held-out sequences is scored"):
        score_text(model, [batches[0] | {"loss_mask": torch.zeros(2, 40)}])


@pytest.mark.parametrize("gates", [{}, {"delay": 4}, {"action": "drop", "delay": 4}])
def test_achieved_ratio_is_what_the_engine_holds(make_compressed, batches, gates):
    model = make_compressed(gates=gates)
    prompts = [row.tolist() for batch in batches for row in batch["input_ids"]]
    stats = [g.stats for g in Engine(model).generate(prompts, SamplingParams(max_new_tokens=1, temperature=0.0))]
    slots = torch.stack([stats.slots for stats in stats]).double()
    score = score_text(model, batches)
    torch.testing.assert_close(score.held.double(), (slots / 40).mean(0), atol=1e-6, rtol=0)
    assert score.achieved_ratio == pytest.approx(len(prompts) * 40 * slots[0].numel() / float(slots.sum()), rel=1e-5)
    without_delay = slots.new_zeros(slots.shape[1:])
    for batch in batches:  # token by token: whoever is decided about counts, executed or not
        trace = GateTrace()
        with torch.no_grad():
            model(batch["input_ids"], use_cache=False, gate_trace=trace)
        for layer, logits in trace.logits.items():
            for row in logits:
                for head, numbers in enumerate(row):
                    without_delay[layer, head] += 1 + sum(not number > 0 for number in numbers[1:])
    torch.testing.assert_close(score.decided.double(), without_delay / (40 * len(prompts)), atol=1e-6, rtol=0)
    assert score.decided_ratio == pytest.approx(len(prompts) * 40 * slots[0].numel() / float(without_delay.sum()))


@pytest.mark.parametrize("gates", [{}, {"action": "drop", "delay": 4}])
def test_what_a_sequence_is_filled_up_with_is_in_no_ratio(make_compressed, batches, gates):
    model, real = make_compressed(gates=gates), torch.arange(40) < 24
    filled = [batch | {"token_mask": real.expand(2, -1), "loss_mask": real.expand(2, -1)} for batch in batches]
    alone = [{"input_ids": batch["input_ids"][:, :24]} for batch in batches]
    scores = [score_text(model, given) for given in (filled, alone)]
    for name in ("held", "decided"):
        torch.testing.assert_close(*(getattr(score, name) for score in scores), atol=1e-6, rtol=0)
    assert scores[0].loss == pytest.approx(scores[1].loss, rel=1e-5)
