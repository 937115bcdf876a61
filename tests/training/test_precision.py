"""What a mixed-precision run computes in: the attention of retrofit and control, validation, and the optimizer."""

import pytest
import torch
import torch.nn.functional as F
from claimed_gpu import put_on_gpu
from launching import logged
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dmc.compression import GateMode, GateTrace
from dmc.config import build_config
from dmc.models import FAMILIES, next_tokens, with_token_losses
from dmc.models.attention import CompressedAttentionMixin, Documents
from dmc.models.masked_attention import as_on
from dmc.training import optimizer_step
from dmc.training.callbacks import adapter_init, validation
from dmc.training.config import RunConfig
from dmc.training.export import Exporter
from dmc.training.measure import score_text
from dmc.training.run import train, warn_of_idle_tensor_cores

STOCK, FUSED = "_scaled_dot_product_flash_attention_for_cpu", "masked_attention"


class Attention(TorchDispatchMode):
    """Notes the dtypes of states, those of what is read for each key or row, and of the output, by operator."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.removesuffix("_backward") in (STOCK, FUSED):
            tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)]
            self.found[name] = tuple(
                {tensor.dtype for tensor in tensors if (tensor.dim() == 4) == is4} for is4 in (True, False)
            )
        return out


@pytest.mark.parametrize(
    ("family", "gates"),
    [
        ("llama", {"delay": 3}), ("llama", None), ("qwen3", {}),
        ("qwen3", {"action": "drop", "delay": 3, "gate_input": "hidden"}),
    ],
)  # fmt: skip
def test_retrofit_and_control_attend_in_bfloat16_under_autocast(make_stock, make_compressed, family, gates):
    """As a GPU does, forward and backward, on shapes alone: biases and log-sum-exps stay float32."""
    model = (make_stock(family) if gates is None else make_compressed(family, gates=gates)).train()
    trace, kernel = GateTrace(), STOCK if gates is None else FUSED
    options = {} if gates is None else {"gate_mode": GateMode(noise_seeds=[0]), "gate_trace": trace}
    with FakeTensorMode(allow_non_fake_inputs=True), as_on("cuda"), Attention() as attention:
        model = put_on_gpu(with_token_losses(model), "cpu")
        input_ids = torch.arange(24).view(1, 24)
        with torch.autocast("cpu", torch.bfloat16):
            losses = model(input_ids, use_cache=False, targets=next_tokens(input_ids), **options)
        losses.cross_entropy.mean().backward()
    both = {torch.bfloat16}, {torch.float32}
    assert attention.found == {kernel: both, f"{kernel}_backward": both}
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    if gates is not None:
        assert {trace.stacked_alpha().dtype, trace.stacked_logits().dtype} == {torch.float32}


def test_bfloat16_attention_stays_near_float32(make_compressed):
    model = make_compressed(gates={"delay": 3}).train()
    input_ids = torch.arange(64).view(1, 64)
    losses = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            options = {"gate_mode": GateMode(noise_seeds=[0]), "targets": next_tokens(input_ids)}
            losses.append(float(model(input_ids, use_cache=False, **options).cross_entropy.detach().mean()))
    assert losses[1] == pytest.approx(losses[0], abs=0.02)


@pytest.fixture
def two_steps(run_values, monkeypatch):
    """A run of two steps that validates after each and exports nothing."""
    run_values["training"] |= {
        "stages": {"retrofit": {"length": "2 steps"}}, "validate_every_steps": 1,
        "validation_sequences": 2, "calibration_sequences": 2, "micro_batch_size": 4,
    }  # fmt: skip
    monkeypatch.setattr(Exporter, "write", lambda *_, **__: None)
    return run_values


def noting_autocast(monkeypatch, module, name):
    """Let a function note whether autocast is on when it is called."""
    called, function = [], getattr(module, name)

    def noted(*arguments, **options):
        called.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16)
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, noted)
    return called


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("auto", "bf16-mixed"), ("auto", "32-true"), pytest.param("ddp", "bf16-mixed", marks=pytest.mark.slow)],
)
def test_validation_and_sensitivity_init_compute_as_training_does_and_the_optimizer_is_fused(
    two_steps, monkeypatch, strategy, precision
):
    two_steps["trainer"] |= {"strategy": strategy, "precision": precision}
    two_steps["compression"] |= {"gate_input": "hidden", "action": "drop"}
    two_steps["training"] |= {"sensitivity_init": {"sequences": 1}, "gradient_clip": 0.01}
    measured = noting_autocast(monkeypatch, adapter_init, "measure_head_sensitivity")
    validated = noting_autocast(monkeypatch, validation, "score_text")
    fused, step = [], torch.optim.AdamW.step

    def noted(self, closure=None):
        fused.append(self.defaults["fused"])
        return step(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    train(build_config(RunConfig, two_steps))
    assert set(measured) == set(validated) == {precision == "bf16-mixed"}
    assert fused == [True] * 2


SEPARATOR = 5


def loss_of_each_document_alone(model, input_ids):
    """Naive: every document by itself at the places it has; the separator predicts the next document's first token."""
    ends = [*((input_ids[0, :-1] == SEPARATOR).nonzero().flatten() + 1).tolist(), input_ids.shape[1]]
    pieces, begin = [], 0
    for end in ends:
        places = torch.arange(begin, end)[None]
        pieces.append(model(input_ids[:, begin:end], position_ids=places, use_cache=False, gate_mode=GateMode()).logits)
        begin = end
    return float(F.cross_entropy(torch.cat(pieces, dim=1)[0, :-1], input_ids[0, 1:]))


def test_scored_documents_do_not_see_each_other_where_training_resets(make_compressed):
    model = make_compressed(gates={"delay": 2}).eval()
    input_ids = torch.randint(6, 80, (1, 40), generator=torch.Generator().manual_seed(0))
    input_ids[0, [9, 10, 27]] = SEPARATOR
    with torch.no_grad():
        expected = loss_of_each_document_alone(model, input_ids)
    batch = {"input_ids": input_ids}
    starts = F.pad(input_ids[:, :-1] == SEPARATOR, (1, 0), value=True)
    score = score_text(model, [batch | {"documents": Documents.from_starts(starts)}])
    assert score.loss == pytest.approx(expected, abs=1e-5)
    assert abs(score_text(model, [batch]).loss - expected) > 1e-3


@pytest.mark.parametrize("resets", [False, True])
def test_validation_resets_at_documents_as_training_does_and_an_export_is_scored_alike(two_steps, monkeypatch, resets):
    monkeypatch.undo()
    given, forward, write = [], CompressedAttentionMixin.forward, Exporter.write

    def noted(self, *arguments, documents=None, gate_mode=None, **options):
        if not self.training and gate_mode == GateMode():
            given.append(documents is not None)
        return forward(self, *arguments, documents=documents, gate_mode=gate_mode, **options)

    for family in FAMILIES.values():
        monkeypatch.setattr(family.attention_class, "forward", noted)
    monkeypatch.setattr(Exporter, "write", lambda *what, **how: given.append("export") or write(*what, **how))
    two_steps["training"] |= {"document_masking": resets, "calibrate": False}
    run = train(build_config(RunConfig, two_steps))
    assert set(given[: given.index("export")]) == {resets}
    scored = run.metrics(run.final)["validation_loss_nats_per_token"]
    assert scored == pytest.approx(logged(run.folder, "validation/loss")[2], abs=1e-7)


def test_without_a_clip_gradients_stay_as_they_are(two_steps, monkeypatch):
    clipped = []
    monkeypatch.setattr(optimizer_step, "clip_grads_with_norm_", lambda *_, **__: clipped.append(1))
    for clip, times in ((1.0, 2), (None, 0)):
        clipped.clear()
        two_steps["training"]["gradient_clip"] = clip
        two_steps["output_dir"] += f"_{clip}"
        train(build_config(RunConfig, two_steps))
        assert len(clipped) == times


def test_float32_on_a_gpu_is_warned_of(caplog):
    for device, precision in (("cpu", "32-true"), ("cuda", "bf16-mixed"), ("cuda", "32-true")):
        warn_of_idle_tensor_cores(torch.device(device), precision)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "trainer.precision=32-true leaves the GPU's tensor cores idle"
    ]
