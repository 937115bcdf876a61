"""Names of the policies that evict, as the oracles have them."""

SURE = {"expectation": True}
"""Option of CaM, whose draws are its own."""
METHODS = ["LocalWindow", "StreamingLLM", "H2O", "TOVA", "VATP", "RoCo", "SnapKV", "PyramidKV", "AdaKV", "CAKE", "LAVa"]
METHODS += ["D2O", "ExpectedAttention", "KVzip", "AttentionMatching"]
