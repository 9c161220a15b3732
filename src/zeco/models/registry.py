"""Which mixers a model can be built of: one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zeco.layers import (
    HGRN2,
    RWKV6,
    RWKV7,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    LightningAttention,
    LinearAttention,
    Mamba2,
    Mixer,
    MultiScaleRetention,
    SoftmaxAttention,
)


@dataclass(frozen=True)
class Place:
    """What a mixer is told of the model that it is built for.

    Attributes:
        width: D.
        num_heads: H.
        conv_width: kernel width of short convolutions; 0 for none.
        norm_eps: of norms.
        index: of the block, from 0.
        num_layers: blocks of the model.
    """

    width: int
    num_heads: int
    conv_width: int
    norm_eps: float
    index: int
    num_layers: int


def _plain(layer: Callable[..., Mixer]) -> Callable[[Place], Mixer]:
    """Make a mixer that depends on sizes only, not on where in the model it stands."""

    def build(place: Place) -> Mixer:
        return _with_convolution(layer, place)

    return build


def _with_convolution(layer: Callable[..., Mixer], place: Place, **others: float) -> Mixer:
    return layer(
        place.width,
        place.num_heads,
        conv_width=place.conv_width,
        norm_eps=place.norm_eps,
        **others,
    )


def _hgrn2(place: Place) -> Mixer:
    # What the paper's learned bounds are before training: evenly spaced, none in the first layer.
    bound = place.index / place.num_layers
    return _with_convolution(HGRN2, place, lower_bound=bound)


def _lightning(place: Place) -> Mixer:
    depth = place.index / max(1, place.num_layers - 1)
    return _with_convolution(LightningAttention, place, depth=depth)


MIXERS: dict[str, Callable[[Place], Mixer]] = {
    # Softmax layers of hybrids have no convolution.
    "attention": lambda place: SoftmaxAttention(place.width, place.num_heads),
    "deltanet": _plain(DeltaNet),
    "gated_deltanet": _plain(GatedDeltaNet),
    "gla": _plain(GatedLinearAttention),
    "hgrn2": _hgrn2,
    "kda": _plain(KimiDeltaAttention),
    "lightning": _lightning,
    "linear_attention": _plain(LinearAttention),
    "mamba2": _plain(Mamba2),
    "retention": _plain(MultiScaleRetention),
    # These shift tokens in place of a convolution, and their norm's eps is their own.
    "rwkv6": lambda place: RWKV6(place.width, place.num_heads),
    "rwkv7": lambda place: RWKV7(place.width, place.num_heads),
}
"""The mixers by the name that `zeco.models.ModelConfig.layers` uses."""
