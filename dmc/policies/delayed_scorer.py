"""KVpop's scorer (arXiv:2607.05061): a recurrent cell of every KV head that rates tokens as they leave a window."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dmc.config.settings import Count, build_config, checked_dataclass
from dmc.files import written_whole

READ_BLOCK = 32
"""Number of tokens that a cell reads at once."""
INITIAL_FORGET_LOGIT = 5.0
"""The cell's memory at first: a token that was read 100 tokens ago still counts half."""


@checked_dataclass(frozen=True)
class ScorerConfig:
    """Shape of a scorer."""

    window: Count = 16
    """Tokens W that always stay: a token is rated when the one W later is read."""
    state_size: Count = 8
    """Channels d of the cell's queries, keys and values; its state has d^2 + d + 1 numbers."""
    width: Count = 16
    """Hidden channels of the map from a token and the cell's answer to a score."""


class DelayedScorer(nn.Module):
    """An mLSTM cell (xLSTM, arXiv:2405.04517, eq. 19 to 27) and a small map for every KV head of every layer.

    The cell reads the head's tokens x_t = (key before RoPE, value), standardized. With i_t, f_t, k_t, v_t and q_t
    linear in x_t, log f_t = logsigmoid of the forget logit and k_t divided by sqrt(d), it has the state

        C_t = f_t C_{t-1} + exp(i_t) v_t k_t^T,    n_t = f_t n_{t-1} + exp(i_t) k_t,

    kept over exp(m_t), m_t = max(log f_t + m_{t-1}, i_t). Token e = t - W, which leaves the window, asks it, and scores

        s_e = w . silu(A [x_e, C_t q_e / max(|n_t . q_e|, 1)] + b) + c.

    From the paper's abstract are the state, the delay, the budget per head and the target. That the scorer reads keys
    and values, and that the leaving token asks, is our reading.

    Args:
        config: its shape.
        num_layers: L, layers with full attention.
        kv_heads: H.
        head_dim: D.
    """

    def __init__(self, config: ScorerConfig, num_layers: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.config, size, heads = config, config.state_size, (num_layers, kv_heads)
        inputs = 2 * head_dim
        self.mean = nn.Buffer(torch.zeros(*heads, inputs))
        self.deviation = nn.Buffer(torch.ones(*heads, inputs))
        self.project = nn.Parameter(torch.randn(*heads, 3 * size + 2, inputs) * inputs**-0.5)
        self.project_bias = nn.Parameter(torch.zeros(*heads, 3 * size + 2))
        self.hidden = nn.Parameter(torch.randn(*heads, config.width, inputs + size) * (inputs + size) ** -0.5)
        self.hidden_bias = nn.Parameter(torch.zeros(*heads, config.width))
        self.output = nn.Parameter(torch.randn(*heads, config.width) * config.width**-0.5)
        self.output_bias = nn.Parameter(torch.zeros(heads))
        with torch.no_grad():
            self.project_bias[..., -1] = INITIAL_FORGET_LOGIT

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.output)

    @property
    def head_numbers(self) -> tuple[int, int]:
        """KV heads and channels of a head."""
        return self.project.shape[1], self.project.shape[3] // 2

    @property
    def state_numbers(self) -> int:
        """Numbers of a head's state: C, n and m."""
        return self.config.state_size**2 + self.config.state_size + 1

    def read(self, layer_index: int, state: Tensor, arriving: Tensor, leaving: Tensor) -> tuple[Tensor, Tensor]:
        """Read tokens and score those that leave the window as each is read.

        Args:
            layer_index: number of the layer.
            state: [S, H, `state_numbers`]; zeros before the first token.
            arriving: consecutive keys before RoPE and values, float32 [S, H, n, 2 D].
            leaving: those of the tokens W before them, in the same shape; anything where there is none.
        Returns:
            Scores of the leaving tokens, [S, H, n], and the state after the last arriving one.
        """
        scores = []
        for new, old in zip(arriving.split(READ_BLOCK, 2), leaving.split(READ_BLOCK, 2), strict=True):
            of_block, state = self._read_block(layer_index, state, new, old)
            scores.append(of_block)
        return torch.cat(scores, dim=2), state

    def _read_block(self, index: int, state: Tensor, new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        size = self.config.state_size
        new, old = ((x - self.mean[index, :, None]) / self.deviation[index, :, None] for x in (new, old))
        weight, bias = self.project[index], self.project_bias[index][:, None]
        key, value, gates = (new @ weight[:, size:].mT + bias[..., size:]).split((size, size, 2), dim=-1)
        query, key = old @ weight[:, :size].mT + bias[..., :size], key * size**-0.5
        before, sums, scale = state.split((size * size, size, 1), dim=-1)
        before = before.unflatten(-1, (size, size))  # of value and key
        decay = torch.nn.functional.logsigmoid(gates[..., 1]).cumsum(-1)  # [S, H, n]
        # log weight of token j in the state after token i: the decay between them, and its input gate
        logs = decay[..., :, None] - decay[..., None, :] + gates[..., None, :, 0]
        logs = logs.masked_fill(torch.ones_like(logs, dtype=torch.bool).triu(1), -torch.inf)
        carried = decay + scale
        largest = torch.maximum(logs.amax(-1), carried)
        weights, kept = (logs - largest[..., None]).exp(), (carried - largest).exp()[..., None]
        shares = weights * (query @ key.mT)
        read = shares @ value + kept * (query @ before.mT)
        total = shares.sum(-1, keepdim=True) + kept * (query @ sums[..., None])
        answer = read / torch.maximum(total.abs(), (-largest).exp()[..., None])
        hidden = torch.cat((old, answer), dim=-1) @ self.hidden[index].mT + self.hidden_bias[index][:, None]
        scores = (torch.nn.functional.silu(hidden) * self.output[index][:, None]).sum(-1)
        last, kept = weights[..., -1, :, None], kept[..., -1, :]
        after = (value * last).mT @ key + kept[..., None] * before
        sums = (key * last).sum(2) + kept * sums
        state = torch.cat((after.flatten(-2), sums, largest[..., -1:]), dim=-1)
        return scores + self.output_bias[index][:, None], state

    def save(self, file: Path) -> None:
        """Write weights and shape as safetensors, all of it or nothing."""
        with written_whole(file) as partial:
            save_file(dict(self.state_dict()), partial, {"scorer": json.dumps(dataclasses.asdict(self.config))})

    @classmethod
    def load(cls, file: Path) -> DelayedScorer:
        """Read a file that `save` has written.

        Raises:
            ValueError: it is not there, or is none.
        """
        try:
            with safe_open(file, "pt") as stored:
                config = build_config(ScorerConfig, json.loads((stored.metadata() or {})["scorer"]), "scorer")
                weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            layers, heads, _, inputs = weights["project"].shape
            scorer = cls(config, layers, heads, inputs // 2)
            scorer.load_state_dict(weights)
        except (OSError, KeyError, ValueError, RuntimeError, SafetensorError, ValidationError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"scorer={file} is no scorer of dmc fit-scorer: {reason}") from error
        return scorer.requires_grad_(False)
