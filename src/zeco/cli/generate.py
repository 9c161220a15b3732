"""``zeco generate``: continue a prompt with a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from zeco.core.errors import ArgumentError
from zeco.models.generation import generate
from zeco.models.io import load_model
from zeco.training.checkpoint import latest_checkpoint
from zeco.training.corpus import BOUNDARY, VOCAB_SIZE, decode, encode


@dataclass(frozen=True)
class Arguments:
    """Continue a prompt with a model that ``zeco train`` wrote.

    Attributes:
        checkpoint: a run's folder (its last checkpoint is taken) or a checkpoint.
        prompt: the text to continue.
        max_new_tokens: bytes to add.
        temperature: 0 takes the likeliest byte each time; 1 draws from the model's distribution.
        seed: of the draws.
    """

    checkpoint: tyro.conf.Positional[Path]
    prompt: str = ""
    max_new_tokens: int = 200
    temperature: float = 0.8
    seed: int = 0


def run(arguments: Sequence[str]) -> int:
    """Run the command."""
    given = tyro.cli(Arguments, args=list(arguments), prog="zeco generate")
    model = load_model(latest_checkpoint(given.checkpoint)).eval()
    if model.config.vocab_size != VOCAB_SIZE:
        raise ArgumentError(
            f"{given.checkpoint} has a vocabulary of {model.config.vocab_size} tokens, but text "
            f"needs {VOCAB_SIZE} bytes; give a model trained on text"
        )
    prompt = torch.tensor([[BOUNDARY, *encode(given.prompt)]])
    generator = torch.Generator().manual_seed(given.seed)
    tokens = generate(
        model,
        prompt,
        max_new_tokens=given.max_new_tokens,
        temperature=given.temperature,
        generator=generator,
    )
    print(decode(tokens[0, 1:].tolist()))
    return 0
