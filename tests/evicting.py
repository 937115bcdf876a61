"""Names of the policies that evict, as the oracles have them; a scorer of the one that is learned."""

import torch

from dmc.policies.delayed_scorer import DelayedScorer, ScorerConfig

SURE = {"expectation": True}
"""Option of CaM, whose draws are its own."""
METHODS = ["LocalWindow", "StreamingLLM", "H2O", "TOVA", "VATP", "RoCo", "SnapKV", "PyramidKV", "AdaKV", "CAKE", "LAVa"]
METHODS += ["D2O", "ExpectedAttention", "KVzip", "AttentionMatching"]
BUDGETS = ({"ratio": 4}, {"tokens": 24})
"""As the oracles take them."""


def write_scorer(file, num_layers=2, kv_heads=2, window=4, state_size=3, width=5, seed=0):
    """Write a random scorer for the tiny models, and return its file's name."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        scorer = DelayedScorer(ScorerConfig(window, state_size, width), num_layers, kv_heads, head_dim=16)
    with torch.no_grad():
        for name, weights in scorer.named_buffers():
            weights += 0.3 * torch.rand(weights.shape, generator=torch.Generator().manual_seed(len(name)))
        scorer.project_bias[..., -1] = 2.0
    scorer.save(file)
    return str(file)
