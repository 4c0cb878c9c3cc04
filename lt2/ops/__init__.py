"""Sequence operations: two linear recurrences (chunkwise and one-token), causal and windowed softmax attention."""

from lt2.ops.attention import attention_decode, causal_attention
from lt2.ops.recurrence.gated_delta import gated_delta_rule, gated_delta_rule_step
from lt2.ops.recurrence.gated_linear import gated_linear_attention, gated_linear_attention_step
from lt2.ops.windowed import windowed_attention

__all__ = [
    "attention_decode",
    "causal_attention",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gated_linear_attention",
    "gated_linear_attention_step",
    "windowed_attention",
]
