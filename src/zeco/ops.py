"""The public operators: names and layouts as in Flash Linear Attention, plus ``sp``."""

from __future__ import annotations

from zeco.operators.gla import gla
from zeco.operators.hgrn2 import hgrn2
from zeco.operators.lightning_attention import lightning_attention
from zeco.operators.linear_attention import linear_attention
from zeco.operators.retention import retention
from zeco.operators.simple_gla import simple_gla

__all__ = [
    "gla",
    "hgrn2",
    "lightning_attention",
    "linear_attention",
    "retention",
    "simple_gla",
]
