from __future__ import annotations

from typing import Any

import pytest

from zeco.core.errors import ConfigError
from zeco.models import CausalLM, ModelConfig
from zeco.models.registry import MIXERS


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 0}, r"model\.vocab_size = 0 must be at least 1"),
        ({"num_layers": -1}, r"model\.num_layers = -1 must be at least 1"),
        ({"width": 20, "num_heads": 4}, r"model\.width = 20 must be a multiple of .* = 8"),
        ({"layers": ()}, r"model\.layers = \(\) must be a list of at least one"),
        ({"layers": ("gla", "retentoin")}, r"model\.layers: .* did you mean 'retention'\?"),
        ({"mlp_ratio": 0.0}, r"model\.mlp_ratio = 0\.0 must be over 0"),
        ({"conv_width": -1}, r"model\.conv_width = -1 must be at least 0"),
        ({"norm_eps": 0.0}, r"model\.norm_eps"),
        ({"init_std": 0.0}, r"model\.init_std"),
    ],
)
def test_names_the_key_and_the_remedy(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**values)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("conv_width", [0, 1, 4])
def test_a_valid_config_builds_every_mixer(name: str, conv_width: int) -> None:
    config = ModelConfig(width=24, num_heads=3, num_layers=2, layers=(name,), conv_width=conv_width)
    assert len(CausalLM(config).blocks) == 2


def test_mixers_repeat_in_order() -> None:
    config = ModelConfig(num_layers=5, layers=("gla", "retention"))
    names = [config.mixer(index) for index in range(5)]
    assert names == ["gla", "retention", "gla", "retention", "gla"]
