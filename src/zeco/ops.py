"""The public operators: names and layouts as in Flash Linear Attention, plus ``sp``."""

from __future__ import annotations

from zeco.operators.delta_rule import delta_rule
from zeco.operators.gated_delta_rule import gated_delta_rule
from zeco.operators.gla import gla
from zeco.operators.hgrn2 import hgrn2
from zeco.operators.kda import kda
from zeco.operators.lightning_attention import lightning_attention
from zeco.operators.linear_attention import linear_attention
from zeco.operators.retention import retention
from zeco.operators.rwkv6 import rwkv6
from zeco.operators.rwkv7 import rwkv7
from zeco.operators.simple_gla import simple_gla
from zeco.operators.ssd import ssd

__all__ = [
    "delta_rule",
    "gated_delta_rule",
    "gla",
    "hgrn2",
    "kda",
    "lightning_attention",
    "linear_attention",
    "retention",
    "rwkv6",
    "rwkv7",
    "simple_gla",
    "ssd",
]
