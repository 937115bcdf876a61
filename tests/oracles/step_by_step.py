"""Slow float64 answers to what `dmc` computes fast: Algorithm 1 of DMC token by token, with python loops over heads.

Written from the paper's step form (arXiv:2403.09636, algorithm 1, with a window) and the delayed gates on top of it. It
shares nothing with `dmc` but the configuration, and reads stock Hugging Face weights by their names.
"""

import math

import numpy as np
import torch


class HeadOracle:
    """One KV head of one layer: raw recent tokens, then slots; one token at a time.

    Of its channels, in the order in which i turns with i + head_dim / 2, so many turn; None: all.
    """

    def __init__(self, compression, head_dim, theta, rotated=None):
        self.rotated = head_dim if rotated is None else rotated
        self.settings, self.head_dim, self.theta = compression, head_dim, theta
        borrows = compression.decisions != "fixed" and compression.gate_input in ("neuron", "both")
        self.neuron = compression.neuron_index % head_dim if borrows else None
        self.leader_neuron = compression.neuron_index if compression.gate_input == "query" else None
        self.raw = []
        self.group = []
        self.slots = []
        self.decisions = []

    def rotate(self, state, position):
        half = self.head_dim // 2
        out = np.empty_like(state)
        for channel in range(half):
            angle = position * self.theta ** (-2 * channel / self.rotated) if 2 * channel < self.rotated else 0.0
            first, second = state[channel], state[channel + half]
            out[channel] = first * np.cos(angle) - second * np.sin(angle)
            out[channel + half] = second * np.cos(angle) + first * np.sin(angle)
        if self.neuron is not None:
            out[self.neuron] = 0
        return out

    def read(self, queries, key, adapted=(0.0, 0.0)):
        """Logits of decision and importance that this head alone would go by; `adapted`: what an adapter adds."""
        decision, importance = adapted
        if self.neuron is not None:
            decision += key[self.neuron]
            importance += np.mean([query[self.neuron] for query in queries])
        if self.leader_neuron is not None:
            decision += queries[0][self.leader_neuron]
        settings = self.settings
        return settings.decision_scale * decision - settings.decision_offset, importance + settings.omega_offset

    def step(self, queries, key, value, scaling, logits=None):
        """Feed token t; return the output of each query head of the group. `logits`: None: as the head reads them."""
        position, settings = len(self.decisions), self.settings
        decision_logit, importance = self.read(queries, key) if logits is None else logits
        decision = int(decision_logit > 0)
        if settings.decisions == "fixed":
            ratio = settings.target_ratio
            decision = int(math.floor(position / ratio) == math.floor((position - 1) / ratio))
        decision = 0 if position == 0 else decision
        omega = 1.0 if settings.weighting == "uniform" else 1 / (1 + np.exp(-importance)) + settings.eps
        self.decisions.append(decision)
        key, queries = key.copy(), [query.copy() for query in queries]
        if self.neuron is not None:
            for state in (key, *queries):
                state[self.neuron] = 0
        if self.leader_neuron is not None:
            queries[0][self.leader_neuron] = 0
        if settings.decided_token == "previous":
            if position > 1:
                self.raw[-1]["decision"] = decision
            decision = 0
        token = {"key": key, "value": value, "omega": omega, "decision": decision, "position": position}

        self.raw.append(token)
        if len(self.raw) > settings.delay:
            self.enter(self.raw.pop(0))
        keys = [slot[0] for slot in self.slots] + [self.rotate(raw["key"], raw["position"]) for raw in self.raw]
        values = [slot[1] for slot in self.slots] + [raw["value"] for raw in self.raw]
        outputs = []
        for number, query in enumerate(queries):
            rotated = self.rotate(query, position)
            if self.leader_neuron is not None and number == 0:
                rotated[self.leader_neuron] = 0
            scores = np.array([rotated @ key * scaling for key in keys])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            outputs.append(sum(weight * value for weight, value in zip(weights, values, strict=True)))
        return outputs

    def enter(self, token):
        """Let a token into the slots: append, merge into the last one, or drop."""
        position = token["position"]
        if self.settings.action == "drop":
            if not token["decision"]:
                self.slots.append((self.rotate(token["key"], position), token["value"]))
            return
        if token["decision"]:
            self.group.append(token)
            self.slots.pop()
        else:
            self.group = [token]
        members = self.group if self.settings.window_size is None else self.group[-self.settings.window_size :]
        total = sum(member["omega"] for member in members)
        key = sum(member["omega"] * member["key"] for member in members) / total
        value = sum(member["omega"] * member["value"] for member in members) / total
        self.slots.append((self.rotate(key, position), value))

    @property
    def num_entries(self):
        return len(self.slots) + len(self.raw)


class ModelOracle:
    """A whole tiny causal LM in float64 from a stock model's weights, every KV head a `HeadOracle`."""

    head_class = HeadOracle

    def __init__(self, model, compression):
        self.weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
        self.config, self.compression = model.config, compression
        self.head_dim = model.model.layers[0].self_attn.head_dim
        self.theta = model.config.rope_parameters["rope_theta"]

    @torch.no_grad()
    def run(self, tokens):
        config = self.config
        caches = [
            [self.head_class(self.compression, self.head_dim, self.theta) for _ in range(config.num_key_value_heads)]
            for _ in range(config.num_hidden_layers)
        ]
        logits = np.stack([self.feed(token, caches) for token in tokens])
        logits -= logits.max(-1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return ModelRun(
            torch.from_numpy(log_probs),
            torch.tensor([[head.num_entries for head in layer] for layer in caches]),
            torch.tensor([[head.decisions for head in layer] for layer in caches]),
        )

    def feed(self, token, caches):
        hidden = self.weights["model.embed_tokens.weight"][token]
        for index, heads in enumerate(caches):
            prefix = f"model.layers.{index}."
            hidden = hidden + self.attention(
                prefix + "self_attn.", heads, self.norm(prefix + "input_layernorm", hidden)
            )
            normed = self.norm(prefix + "post_attention_layernorm", hidden)
            gate = self.linear(prefix + "mlp.gate_proj", normed)
            gate = gate / (1 + np.exp(-gate))
            hidden = hidden + self.linear(prefix + "mlp.down_proj", gate * self.linear(prefix + "mlp.up_proj", normed))
        hidden = self.norm("model.norm", hidden)
        return self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"]) @ hidden

    def attention(self, prefix, heads, hidden):
        query, key, value = (self.linear(prefix + name, hidden) for name in ("q_proj", "k_proj", "v_proj"))
        queries, keys, values = (state.reshape(-1, self.head_dim) for state in (query, key, value))
        if prefix + "q_norm.weight" in self.weights:
            queries = [self.norm(prefix + "q_norm", query) for query in queries]
            keys = [self.norm(prefix + "k_norm", key) for key in keys]
        group = len(queries) // len(heads)
        outputs = []
        groups = [list(queries[number * group : (number + 1) * group]) for number in range(len(heads))]
        logits = self.logits(prefix, heads, groups, keys, hidden)
        for head, logit, *states in zip(heads, logits, groups, keys, values, strict=True):
            outputs += head.step(*states, self.head_dim**-0.5, logit)
        return self.linear(prefix + "o_proj", np.concatenate(outputs))

    def logits(self, prefix, heads, groups, keys, hidden):
        adapted = np.zeros((len(heads), 2))
        if prefix + "gate_adapter.weight" in self.weights:
            adapted = self.linear(prefix + "gate_adapter", hidden).reshape(-1, 2)
        logits = [head.read(*states) for head, *states in zip(heads, groups, keys, adapted, strict=True)]
        return [tuple(np.mean(logits, axis=0))] * len(heads) if self.compression.decisions == "per_layer" else logits

    def linear(self, name, states):
        out = self.weights[f"{name}.weight"] @ states
        return out + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else out

    def norm(self, name, states):
        return states / np.sqrt((states**2).mean() + self.config.rms_norm_eps) * self.weights[f"{name}.weight"]


class ModelRun:
    """What the oracle found: log-probs after each token [T, vocab], entries [L, H] and decisions [L, H, T]."""

    def __init__(self, log_probs, entries, decisions):
        self.log_probs, self.entries, self.decisions = log_probs, entries, decisions
