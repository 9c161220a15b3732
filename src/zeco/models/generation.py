"""Text generation by state: the prompt in one pass, then one token at a time at constant cost."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco.core.errors import ArgumentError
from zeco.core.shapes import check_shapes
from zeco.models.backbone import States
from zeco.models.causal_lm import CausalLM


@torch.no_grad()
def generate(
    model: CausalLM,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    prefill_tokens: int | None = None,
) -> Tensor:
    """Continue prompts.

    Args:
        model: the model.
        input_ids: prompts of equal length [B, T], T at least 1.
        max_new_tokens: tokens to add, at least 0.
        temperature: the logits' divisor; 0 takes the likeliest token each time.
        top_k: draw among the k likeliest tokens only; None for all.
        generator: of the draws, on the model's device; None for torch's global one.
        prefill_tokens: read the prompt in pieces of so many tokens, which bounds the memory that a
            long one takes; None for one piece.

    Returns:
        Prompts and new tokens, [B, T + max_new_tokens].

    Raises:
        ArgumentError: an argument is out of its range.
    """
    sizes = check_shapes("generate", {"input_ids": (input_ids, "B T")})
    T = sizes["T"]
    for name, value, least in (
        ("the prompt's length", T, 1),
        ("max_new_tokens", max_new_tokens, 0),
        ("temperature", temperature, 0),
        ("top_k", top_k, 1),
        ("prefill_tokens", prefill_tokens, 1),
    ):
        if value is not None and value < least:
            raise ArgumentError(f"generate: {name} is {value}, but must be at least {least}")
    tokens = input_ids
    states: States | None = None
    logits = torch.empty(0)
    piece = prefill_tokens or T
    for start in range(0, T, piece):
        logits, states = _read(model, tokens[:, start : start + piece], start, states)
    for position in range(T, T + max_new_tokens):
        new = sample(logits[:, -1], temperature=temperature, top_k=top_k, generator=generator)
        tokens = torch.cat([tokens, new[:, None].to(tokens.dtype)], 1)
        if position + 1 < T + max_new_tokens:
            logits, states = _read(model, new[:, None], position, states)
    return tokens


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a token [B] from logits [B, vocab_size]; the keywords are those of `generate`.

    >>> sample(torch.tensor([[0.0, 2.0, 1.0]]), temperature=0).tolist()
    [1]
    """
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    weights = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(weights, 1, generator=generator)[:, 0]


def _read(
    model: CausalLM, tokens: Tensor, start: int, states: States | None
) -> tuple[Tensor, States]:
    """Feed tokens [B, T] at positions from ``start`` on; return logits and states."""
    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
    return model(tokens, position_ids=positions, states=states, output_states=True)
