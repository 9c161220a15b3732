"""Layers that mix tokens through a linear-attention operator, on one device or over many."""

from __future__ import annotations

from zeco.layers.attention import SoftmaxAttention
from zeco.layers.convolution import ShortConvolution
from zeco.layers.deltanet import DeltaNet, GatedDeltaNet, KimiDeltaAttention
from zeco.layers.gla import GatedLinearAttention
from zeco.layers.hgrn2 import HGRN2
from zeco.layers.lightning import LightningAttention
from zeco.layers.linear_attention import LinearAttention
from zeco.layers.mamba2 import Mamba2
from zeco.layers.mixer import Mixer, MixerState
from zeco.layers.norms import GatedRMSNorm
from zeco.layers.retention import MultiScaleRetention
from zeco.layers.rwkv6 import RWKV6
from zeco.layers.rwkv7 import RWKV7

__all__ = [
    "HGRN2",
    "RWKV6",
    "RWKV7",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GatedRMSNorm",
    "KimiDeltaAttention",
    "LightningAttention",
    "LinearAttention",
    "Mamba2",
    "Mixer",
    "MixerState",
    "MultiScaleRetention",
    "ShortConvolution",
    "SoftmaxAttention",
]
