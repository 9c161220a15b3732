"""The configuration of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeco.core.errors import ConfigError, unknown_name
from zeco.models.registry import MIXERS


def _need(condition: bool, key: str, value: Any, accepted: str) -> None:
    if not condition:
        raise ConfigError(f"config key model.{key} = {value!r} must be {accepted}")


@dataclass(frozen=True)
class ModelConfig:
    """A causal language model.

    Attributes:
        vocab_size: number of tokens; 256 for bytes.
        width: D, channels of a token between layers.
        num_layers: blocks of a mixer and an MLP.
        num_heads: H of every mixer.
        layers: names of mixers (see `zeco.models.registry`), repeated in this order.
        mlp_ratio: hidden width of an ungated MLP of the same size, in multiples of D.
        conv_width: kernel width of the mixers' short convolutions; 0 for none. RWKV mixers, which
            shift tokens by one instead, have none in any case.
        norm_eps: added to the mean squares of norms.
        tie_embeddings: use the embedding matrix for the logits too.
        init_std: standard deviation of initial weight matrices.
        activation_checkpointing: recompute a block's activations in the backward pass, without
            any communication.
    """

    vocab_size: int = 256
    width: int = 256
    num_layers: int = 4
    num_heads: int = 4
    layers: tuple[str, ...] = ("gla",)
    mlp_ratio: float = 4.0
    conv_width: int = 4
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "num_layers", "num_heads"):
            _need(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _need(
            self.width % (2 * self.num_heads) == 0,
            "width",
            self.width,
            f"a multiple of 2 * model.num_heads = {2 * self.num_heads}, since mixers cut it (or "
            "half of it) into heads",
        )
        _need(len(self.layers) > 0, "layers", self.layers, "a list of at least one mixer's name")
        for layer in self.layers:
            if layer not in MIXERS:
                raise ConfigError(
                    "config key model.layers: " + unknown_name("mixer", layer, MIXERS)
                )
        _need(self.mlp_ratio > 0, "mlp_ratio", self.mlp_ratio, "over 0")
        _need(self.conv_width >= 0, "conv_width", self.conv_width, "at least 0 (0 for none)")
        _need(self.norm_eps > 0, "norm_eps", self.norm_eps, "over 0")
        _need(self.init_std > 0, "init_std", self.init_std, "over 0")

    def mixer(self, index: int) -> str:
        """Return the name of a block's mixer.

        >>> ModelConfig(layers=("gla", "retention")).mixer(2)
        'gla'
        """
        return self.layers[index % len(self.layers)]
