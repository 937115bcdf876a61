"""The learned method as pure tensor code: gates, accumulation, relaxation, losses, schedules. Needs torch alone."""

from dmc.compression.accumulate import accumulate
from dmc.compression.base import CompressedCache, CompressionConfig, DecidedTokens, GateMode, GateOutput, GateTrace
from dmc.compression.gates import Compressor, fixed_decisions
from dmc.compression.losses import HeadAgreement, compression_loss, head_agreement_loss, held_fraction
from dmc.compression.relaxation import hard_decisions, sample_decisions, straight_through
from dmc.compression.rotary import full_attention_tables, leader_scale, rotate
from dmc.compression.schedules import target_ratio_at, zero_out_multiplier_at

__all__ = [
    "CompressedCache",
    "CompressionConfig",
    "Compressor",
    "DecidedTokens",
    "GateMode",
    "GateOutput",
    "GateTrace",
    "HeadAgreement",
    "accumulate",
    "compression_loss",
    "fixed_decisions",
    "full_attention_tables",
    "hard_decisions",
    "head_agreement_loss",
    "held_fraction",
    "leader_scale",
    "rotate",
    "sample_decisions",
    "straight_through",
    "target_ratio_at",
    "zero_out_multiplier_at",
]
