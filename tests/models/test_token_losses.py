import os

import pytest
import torch
import torch.nn.functional as F
from covering import cover
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.utils import _apply_to_tensors
from torch.utils.flop_counter import FlopCounterMode

from dmc.models import fused_losses, next_tokens, sequence_means, token_losses, with_token_losses
from dmc.models.token_losses import (
    IGNORED,
    LossHead,
    LossWeights,
    TeacherOutput,
    losses_of_rows,
    num_predicted,
    sequence_weights,
    token_mean,
)

NEAR = {torch.float64: 1e-12, torch.float32: 1e-5}


def plain_losses(logits, targets, teacher=None, temperature=1.0, direction="forward"):
    """Naive: cross-entropy and divergence of each token from logits in one piece."""
    entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    if teacher is None:
        return entropy, None
    p, q = ((scores / temperature).log_softmax(-1) for scores in (teacher, logits))
    p, q = (p, q) if direction == "forward" else (q, p)
    return entropy, (temperature**2 * (p.exp() * (p - q)).sum(-1)).masked_fill(targets == -100, 0)


def loss_of(entropy, divergence, targets):
    loss = sequence_means(entropy, targets).mean()
    return loss if divergence is None else 0.25 * loss + 0.75 * sequence_means(divergence, targets).mean()


@pytest.mark.parametrize(
    ("dtype", "temperature", "direction"), cover(tuple(NEAR), (None, 1.0, 2.5), ("forward", "reverse"))
)
def test_losses_and_gradients_are_those_of_whole_logits(monkeypatch, dtype, temperature, direction):
    monkeypatch.setattr(token_losses, "CHUNK_ELEMENTS", 4 * 700)  # 4 tokens at a time: the last chunk is not full
    generator = torch.Generator().manual_seed(0)
    hidden, theirs = (torch.randn(3, 7, size, dtype=dtype, generator=generator) for size in (10, 6))
    head = LossHead(10, 700, bias=False, dtype=dtype)
    weight = torch.randn(700, 6, dtype=dtype, generator=generator)
    ids = torch.randint(700, (3, 7), generator=generator)
    mask = torch.tensor([[1] * 7, [0, 0, 1, 0, 1, 0, 0], [0] * 7], dtype=torch.bool)
    targets = next_tokens(ids, mask)
    assert targets.tolist()[1] == [-100, int(ids[1, 2]), -100, int(ids[1, 4]), -100, -100, -100]
    found = []
    weights = sequence_weights(targets, dtype=dtype) / len(targets)
    for at_once in (True, False, None):
        states, head.weight.grad = hidden.clone().requires_grad_(), None
        if at_once:
            teacher = None if temperature is None else theirs @ weight.T
            losses = plain_losses(head(states), targets, teacher, temperature, direction)
        else:
            taught = None if temperature is None else TeacherOutput(theirs, weight, temperature, direction)
            losses = head(states, targets, taught) if at_once is False else []
        if at_once is None:  # as training, which knows the tokens' weights before: the gradient is made at once
            shares = (weights, None) if temperature is None else (0.25 * weights, 0.75 * weights)
            *losses, total = head(states, targets, taught, LossWeights(*shares))
            assert not any(loss.requires_grad for loss in losses if loss is not None)
            (3 * total).backward()
            torch.testing.assert_close(total, loss_of(*losses, targets), rtol=NEAR[dtype], atol=NEAR[dtype])
            states.grad /= 3
            head.weight.grad /= 3
        else:
            loss_of(*losses, targets).backward()
        found.append([losses[0].detach(), states.grad, head.weight.grad])
        found[-1] += [] if temperature is None else [losses[1].detach()]
    for got, expected in zip(found[1] + found[2], found[0] + found[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=NEAR[dtype], atol=NEAR[dtype])


def test_a_mask_of_numbers_says_how_much_each_token_counts():
    losses, ids = torch.rand(2, 6), torch.randint(9, (2, 6))
    weights = torch.tensor([[5.0, 0.0, 9.0, 1.0, 0.5, 1.0], [1.0] + [0.0] * 5])
    targets = next_tokens(ids, weights)
    assert targets.tolist() == [[-100, *ids[0, 2:].tolist(), -100], [-100] * 6]
    means = sequence_means(losses.masked_fill(targets == -100, 0), targets, weights)
    expected = (9 * losses[0, 1] + losses[0, 2] + losses[0, 3] / 2 + losses[0, 4]) / 11.5
    torch.testing.assert_close(means, torch.tensor([float(expected), 0.0]))
    mask = weights > 0
    assert torch.equal(sequence_means(losses, targets, mask), sequence_means(losses, targets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_weights_of_any_dtype_count_in_the_sum_as_in_the_number(dtype):
    losses, ids = torch.rand(2, 6), torch.randint(9, (2, 6))
    weights = torch.tensor([[5, 0, 9, 1, 2, 1], [1, 0, 0, 3, 0, 0]], dtype=dtype)
    targets = next_tokens(ids, weights)
    numbers = [0.0, 9, 1, 2, 1], [0.0, 0, 3, 0, 0]
    sums = [(losses[row, :5] * torch.tensor(numbers[row])).sum() for row in range(2)]
    torch.testing.assert_close(sequence_means(losses, targets, weights), torch.stack([sums[0] / 13, sums[1] / 3]))
    for number in (None, num_predicted(weights)):
        torch.testing.assert_close(token_mean(losses, targets, weights, number), sum(sums) / 16)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_gradients_of_the_divergence_are_those_of_finite_differences(monkeypatch, direction):
    monkeypatch.setattr(token_losses, "CHUNK_ELEMENTS", 2 * 300)
    generator = torch.Generator().manual_seed(2)
    sizes = ((1, 3, 4), (300, 4), (1, 3, 2), (300, 2))
    hidden, weight, theirs, other = (torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes)
    head, targets = LossHead(4, 300, bias=False, dtype=torch.float64), torch.tensor([[7, 280, 0]])

    def losses(hidden, weight):
        return torch.func.functional_call(
            head, {"weight": weight}, (hidden, targets, TeacherOutput(theirs, other, 1.7, direction))
        )

    torch.autograd.gradcheck(losses, (hidden.requires_grad_(), weight.requires_grad_()), fast_mode=True)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_model_that_says_what_its_teacher_says_diverges_by_nothing(direction):
    hidden, ids = torch.randn(2, 9, 8), torch.randint(500, (2, 9))
    head = LossHead(8, 500, bias=False)
    _, divergence = head(
        hidden, next_tokens(ids), TeacherOutput(hidden.clone(), head.weight.detach().clone(), 3.0, direction)
    )
    assert divergence.abs().max() < 1e-6


def test_a_teacher_of_other_words_is_refused():
    head = LossHead(8, 500, bias=False)
    with pytest.raises(ValueError, match="the teacher's vocabulary has 400 tokens, the model's 500"):
        head(
            torch.randn(1, 4, 8),
            torch.zeros(1, 4, dtype=torch.long),
            TeacherOutput(torch.randn(1, 4, 8), torch.randn(400, 8)),
        )


def test_a_steps_loss_does_not_depend_on_how_its_sequences_are_divided(make_stock):
    model = with_token_losses(make_stock())
    ids, mask = torch.randint(83, (4, 12)), torch.rand(4, 12) < 0.4
    mask[2] = False

    def mean(rows):
        targets = next_tokens(ids[rows], mask[rows])
        return sequence_means(model(ids[rows], targets=targets).cross_entropy, targets).mean()

    torch.testing.assert_close(torch.stack([mean(slice(i, i + 1)) for i in range(4)]).mean(), mean(slice(0, 4)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_model_gives_the_losses_and_gradients_of_its_logits(make_stock, make_compressed, compressed, tied):
    make = make_compressed if compressed else make_stock
    model = make("qwen2", tie_word_embeddings=tied).eval()
    names, ids = list(model.state_dict()), torch.randint(83, (2, 20), generator=torch.Generator().manual_seed(0))
    expected = model(ids, labels=ids, use_cache=False)
    assert expected.logits.shape == (2, 20, 83)  # labels are the stock model's, logits included
    expected.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    targets = next_tokens(ids)
    losses = with_token_losses(model)(ids, targets=targets, use_cache=False)
    loss = sequence_means(losses.cross_entropy, targets).mean()
    loss.backward()
    torch.testing.assert_close(loss, expected.loss)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == names
    assert type(model).__name__.endswith("Qwen2ForCausalLM")


def test_autocast_computes_in_its_dtype_as_whole_logits_do(make_stock):
    model = with_token_losses(make_stock())
    ids = torch.randint(83, (2, 20), generator=torch.Generator().manual_seed(0))
    targets = next_tokens(ids)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, use_cache=False).logits
        losses = model(ids, targets=targets, use_cache=False).cross_entropy
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(losses, plain_losses(logits.float(), targets)[0], rtol=1e-6, atol=1e-6)
    losses.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.float32


PRECISIONS = {
    "float32": (torch.float32, False, 1024),
    "bf16-mixed": (torch.float32, True, 1024),
    "bf16-shards": (torch.bfloat16, False, 4096),
}


@pytest.mark.parametrize(("precision", "distils"), zip(PRECISIONS, (None, "forward", "reverse"), strict=True))
def test_128k_words_take_a_quarter_of_the_memory_of_whole_logits(precision, distils):
    """The gradient of the weight, which both make, is counted in both."""
    dtype, autocast, width = PRECISIONS[precision]
    length, words = 4096, 128 * 1024

    def peak(at_once):
        with FakeTensorMode():
            head = LossHead(width, words, bias=False, dtype=dtype)
            hidden = torch.randn(1, length, width, dtype=dtype, requires_grad=True)
            theirs, weight = torch.randn(1, length, width, dtype=dtype), torch.randn(words, width, dtype=dtype)
            targets = torch.zeros(1, length, dtype=torch.long)
            tracker = MemTracker()
            tracker.track_external(head, hidden, theirs, weight, targets)
            with tracker:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    if at_once:  # as it was
                        logits = head(hidden)
                        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten())
                        if distils:
                            with torch.no_grad():
                                taught = F.linear(theirs, weight)
                            p, q = (scores.float().log_softmax(-1).flatten(0, 1) for scores in (taught, logits))
                            loss = loss + F.kl_div(q, p, reduction="batchmean", log_target=True)
                    else:
                        taught = TeacherOutput(theirs, weight, direction=distils) if distils else None
                        loss = loss_of(*head(hidden, targets, taught), targets)
                loss.backward()
            found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        return found - sum(tensor.nbytes for tensor in (head.weight, hidden, theirs, weight, targets))

    plain, chunked = peak(True), peak(False)
    print(f"{plain / 2**30:.2f} GiB in one piece, {chunked / 2**30:.2f} GiB in chunks")
    assert chunked <= plain / 4


@pytest.mark.parametrize("distils", [False, True])
def test_training_makes_each_logit_once(distils):
    """Products with the output projection: forward and two gradients, and the teacher's; twice without weights."""
    head, targets = LossHead(8, 500, bias=False), torch.randint(500, (1, 30))
    taught = TeacherOutput(torch.randn(1, 30, 8), torch.randn(500, 8)) if distils else None
    weights, counts = torch.rand(1, 30), []
    for known in (LossWeights(weights, weights if distils else None), None):
        with FlopCounterMode(display=False) as flops:
            *losses, last = head(torch.randn(1, 30, 8, requires_grad=True), targets, taught, known)
            if known is None:
                last = sum((loss * weights).sum() for loss in (*losses, last) if loss is not None)
            last.backward()
        counts.append(flops.get_total_flops() / (2 * 30 * 8 * 500))
    assert counts == [3 + distils, 4 + 2 * distils]


def test_weights_keep_their_precision_where_fsdp_casts_a_models_arguments():
    weights = LossWeights(torch.rand(2, 3), torch.rand(2, 3))
    given = _apply_to_tensors(lambda tensor: tensor.bfloat16(), {"loss_weights": weights})
    assert given["loss_weights"] is weights and weights.cross_entropy.dtype == torch.float32


@pytest.mark.parametrize(
    ("temperature", "direction", "weighs"), cover((None, 1.0, 1.7), ("forward", "reverse"), ("both", "one", "none"))
)
def test_kernels_of_losses_are_those_of_the_definition(monkeypatch, temperature, direction, weighs):
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs in a process that tests/kernels/test_interpreter.py starts")
    monkeypatch.setattr(fused_losses, "WORDS", 64)  # the last part of a row is not full
    generator = torch.Generator().manual_seed(0)
    logits, theirs = (5 * torch.randn(6, 300, generator=generator) for _ in range(2))
    targets = torch.tensor([0, 299, IGNORED, 64, 63, IGNORED])
    taught = None if temperature is None else TeacherOutput(theirs, theirs, temperature, direction)
    by = tuple(torch.rand(6, generator=generator).masked_fill(targets == IGNORED, 0) for _ in range(2))
    by = {"both": by, "one": (by[0], None), "none": None}[weighs]
    given = None if temperature is None else theirs.clone()
    found = fused_losses.fused_losses_of_rows(logits.clone(), given, targets, taught, by, torch.float32)
    expected = losses_of_rows(logits, None if temperature is None else theirs, targets, taught, by)
    for ours, oracle in zip(found, expected, strict=True):
        assert (ours is None) == (oracle is None)
        if ours is not None:
            rows = targets != IGNORED
            torch.testing.assert_close(ours[rows], oracle[rows], rtol=1e-5, atol=2e-6)
            assert not ours[~rows].any()  # where nothing is to be predicted
