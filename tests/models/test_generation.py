from __future__ import annotations

from typing import Any

import pytest
import torch

from zeco.core.errors import ArgumentError
from zeco.models import CausalLM, ModelConfig, generate
from zeco.models.generation import sample

CONFIG = ModelConfig(
    vocab_size=23, width=16, num_layers=2, num_heads=2, layers=("gla", "retention"), init_std=0.3
)


def make() -> CausalLM:
    return CausalLM(CONFIG, seed=2).double().eval()


def prompt() -> torch.Tensor:
    return torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.mark.parametrize("prefill_tokens", [None, 1, 2])
def test_greedy_is_the_argmax_of_whole_passes(prefill_tokens: int | None) -> None:
    model, tokens = make(), prompt()
    found = generate(model, tokens, max_new_tokens=8, temperature=0, prefill_tokens=prefill_tokens)
    with torch.no_grad():
        for _ in range(8):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, tokens)


def test_equal_seeds_draw_equal_tokens() -> None:
    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return generate(make(), prompt(), max_new_tokens=12, generator=generator)

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_top_k_keeps_to_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.9, 1.0]]).expand(200, 4)
    generator = torch.Generator().manual_seed(0)
    assert set(sample(logits, top_k=2, generator=generator).tolist()) == {1, 2}
    assert set(sample(logits, top_k=9, generator=generator).tolist()) >= {1, 2}


def test_no_new_tokens_return_the_prompt() -> None:
    assert torch.equal(generate(make(), prompt(), max_new_tokens=0), prompt())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1, but must be at least 0"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"top_k": 0}, "top_k is 0, but must be at least 1"),
        ({"prefill_tokens": 0}, "prefill_tokens is 0"),
    ],
)
def test_refuses_arguments_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        generate(make(), prompt(), **{"max_new_tokens": 1, **changes})


def test_refuses_an_empty_prompt() -> None:
    with pytest.raises(ArgumentError, match="prompt's length is 0"):
        generate(make(), prompt()[:, :0], max_new_tokens=1)
