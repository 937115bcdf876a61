"""Rows of several lengths: padding, packed documents, and holes in a mask."""

import copy
import itertools
import re

import pytest
import torch
import torch.nn.functional as F

from dmc import retrofit
from dmc.compression import CompressionConfig, GateMode, GateTrace
from dmc.models import with_token_losses
from dmc.models.attention import Documents
from dmc.models.modeling import for_unpadded
from dmc.training.teacher import Teacher

TOLERANCE = 1e-4
PREVIOUS = {"decided_token": "previous", "action": "drop", "delay": 9, "gate_input": "query"}
SHARED = [{"decisions": "per_layer", "delay": delay} for delay in (0, 4)]
FIXED = [
    {"decisions": "fixed", "weighting": "uniform", "window_size": window, "delay": delay, "target_ratio": ratio}
    for window, delay, ratio in ((None, 0, 4.0), (3, 4, 2.5))
]


def name_of(gates):
    return "-".join(f"{key}={value}" for key, value in gates.items())


def parallel_log_probs(model, tokens, **options):
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False, **options).logits[0]
    return logits.log_softmax(-1)


def difference(ours, theirs):
    return (ours.double() - theirs.double()).abs().max().item()


PADDED = [{}, {"delay": 4}, {"action": "drop", "delay": 4}, {"window_size": None}, SHARED[0], PREVIOUS, *FIXED]


@pytest.mark.parametrize(
    ("gates", "side"),
    [*zip(PADDED, itertools.cycle(("left", "right")), strict=False), ({}, "right"), ({"delay": 4}, "left")],
    ids=str,
)
def test_padding_leaves_real_tokens_alone(gates, side, make_compressed, make_prompts):
    model = make_compressed(gates=gates)
    prompts = make_prompts(5, 23, 17)
    input_ids, mask = torch.full((3, 23), 7), torch.zeros(3, 23, dtype=torch.long)
    places = [slice(23 - len(prompt), 23) if side == "left" else slice(len(prompt)) for prompt in prompts]
    for row, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
        input_ids[row, place], mask[row, place] = torch.tensor(prompt), 1
    with torch.no_grad():
        padded = model(input_ids, attention_mask=mask, use_cache=False).logits.log_softmax(-1)
    for row, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
        assert difference(padded[row, place], parallel_log_probs(model, prompt)) < TOLERANCE


@pytest.mark.parametrize(
    ("gates", "training"),
    zip(
        [{}, {"delay": 4}, {"action": "drop", "delay": 2}, SHARED[1], *FIXED],
        itertools.cycle((True, False)),
        strict=False,
    ),
    ids=str,
)
def test_packed_documents_equal_the_documents_alone(gates, training, make_compressed, make_prompts):
    model = make_compressed(gates=gates)
    separator = 82
    lengths = [[9, 13, 2], [24]]
    documents = [
        [[token % 82 for token in prompt] for prompt in make_prompts(*(n - 1 for n in row), seed=5)] for row in lengths
    ]
    packed = torch.tensor([[token for document in row for token in (*document, separator)] for row in documents])
    boundaries = Documents.from_starts(F.pad(packed[:, :-1] == separator, (1, 0), value=True))
    spans = [(0, 0, 9), (0, 9, 22), (0, 22, 24), (1, 0, 24)]
    # With noise drawn for whole rows only thresholded decisions can be compared; training mode must not change them.
    model.train(training)
    with torch.no_grad():
        logits = model(packed, use_cache=False, documents=boundaries, gate_mode=GateMode()).logits.log_softmax(-1)
    positions = torch.cat([torch.arange(end - begin) for _, begin, end in spans]).view(2, 24)
    with torch.no_grad():
        restarted = model(
            packed, use_cache=False, documents=boundaries, gate_mode=GateMode(), position_ids=positions
        ).logits.log_softmax(-1)
    for row, begin, end in spans:
        tokens, place = packed[row, begin:end].tolist(), torch.arange(begin, end)[None]
        alone = parallel_log_probs(model, tokens, position_ids=place, gate_mode=GateMode())
        assert difference(logits[row, begin:end], alone) < TOLERANCE
        alone = parallel_log_probs(model, tokens, gate_mode=GateMode())
        assert difference(restarted[row, begin:end], alone) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "gates"),
    [("qwen3", {}), ("llama", {"delay": 4}), ("qwen3", {"action": "drop", "delay": 2})],
    ids=str,
)
def test_teacher_control_zero_out_and_closed_gates_see_the_same_documents(family, gates, make_stock, make_prompts):
    stock = make_stock(family)
    borrowing = retrofit(copy.deepcopy(stock), CompressionConfig(**gates))
    closed = retrofit(copy.deepcopy(stock), CompressionConfig(gate_input="hidden", **gates))  # its adapter starts at 0
    control = for_unpadded(with_token_losses(copy.deepcopy(stock)))
    input_ids = torch.tensor(make_prompts(40, 40))
    starts = torch.zeros(2, 40, dtype=torch.bool)
    starts[[0, 0, 1], [7, 30, 19]] = True
    documents = Documents.from_starts(starts)
    with torch.no_grad():
        teacher = Teacher(copy.deepcopy(stock), "", 1.0).read(input_ids, documents)
        found = [
            teacher.hidden_states @ teacher.weight.T,
            control(input_ids, use_cache=False, documents=documents).logits,
            borrowing(
                input_ids, use_cache=False, documents=documents, gate_mode=GateMode(neuron_multiplier=1.0)
            ).logits,
            closed(input_ids, use_cache=False, documents=documents, gate_mode=GateMode()).logits,
        ]
        expected = torch.zeros_like(found[0])  # positions continue over documents: RoPE tells differences alone
        for row, begin, end in [(0, 0, 7), (0, 7, 30), (0, 30, 40), (1, 0, 19), (1, 19, 40)]:
            expected[row, begin:end] = stock(input_ids[row : row + 1, begin:end], use_cache=False).logits[0]
        undivided = stock(input_ids, use_cache=False).logits
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert difference(undivided, expected) > 0.1


def test_documents_reset_relaxed_decisions_too(make_compressed, make_prompts):
    model = make_compressed()
    packed = torch.tensor(make_prompts(24, 24))
    boundaries = Documents.from_starts(F.pad(packed[:, :-1] == packed[0, 7], (1, 0), value=True))
    trace, mode = GateTrace(), GateMode(noise_seeds=[1, 2])
    model.train()(packed, use_cache=False, documents=boundaries, gate_mode=mode, gate_trace=trace)
    alpha = trace.stacked_alpha().transpose(2, 3)  # [L, B, T, H]
    assert not alpha[:, boundaries.starts].any()
    assert (alpha[:, ~boundaries.starts] > 0).all()


HOLES = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]])


@pytest.mark.parametrize("delay", [0, 4])
def test_a_hole_in_the_mask_counts_places_as_the_stock_model_does(delay, make_stock, make_prompts):
    stock, input_ids = make_stock(), torch.tensor(make_prompts(12, 12))
    model = retrofit(copy.deepcopy(stock), CompressionConfig(**{**FIXED[0], "delay": delay, "target_ratio": 1.0}))
    with torch.no_grad():
        expected, ours = (
            network(input_ids, attention_mask=HOLES, use_cache=False).logits.log_softmax(-1)
            for network in (stock, model)
        )
    assert difference(ours[HOLES.bool()], expected[HOLES.bool()]) < TOLERANCE / 10
    pad = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for use_cache in (True, False):  # generate() counts real tokens, in both
        expected, ours = (
            network.generate(input_ids, attention_mask=HOLES, use_cache=use_cache, **pad)[:, 12:]
            for network in (stock, model)
        )
        assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("gates", [{}, {"delay": 2, "window_size": None}, {"action": "drop", "delay": 1}], ids=name_of)
def test_nothing_merges_with_what_lies_in_a_hole(gates, make_compressed, make_prompts):
    model, input_ids = make_compressed(gates=gates), torch.tensor(make_prompts(12, 12))
    with torch.no_grad():
        one, other = (
            model(ids, attention_mask=HOLES, use_cache=False).logits[HOLES.bool()]
            for ids in (input_ids, torch.where(HOLES.bool(), input_ids, 82 - input_ids))
        )
    assert torch.equal(one, other)


def test_a_hole_that_a_cache_cannot_count_is_refused(make_compressed, make_prompts):
    model, input_ids = make_compressed(), torch.tensor(make_prompts(12, 12))
    with pytest.raises(ValueError, match="has 0 between real tokens: a compressed cache stores real tokens alone"):
        model(input_ids, attention_mask=HOLES, use_cache=True)
    model(input_ids, attention_mask=(HOLES.cumsum(-1) > 0).long(), use_cache=True)


@pytest.mark.parametrize("shape", [(2, 1, 12, 12), (12, 12, 1), (12,)])
def test_masks_that_are_not_of_padding_are_refused(shape, make_compressed, make_prompts):
    model, input_ids = make_compressed(), torch.tensor(make_prompts(12, 12))
    expected = re.escape(f"attention_mask of shape {shape}: compressed attention takes a padding mask [batch, tokens]")
    with pytest.raises(ValueError, match=expected):
        model(input_ids, attention_mask=torch.ones(shape), use_cache=False)
    with pytest.raises(ValueError, match=expected):
        model.generate(input_ids, attention_mask=torch.ones(shape), max_new_tokens=2)
