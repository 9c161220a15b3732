"""Language models built of linear-attention layers."""

from __future__ import annotations

from zeco.models.causal_lm import CausalLM, States, count_parameters, gather_states
from zeco.models.config import ModelConfig
from zeco.models.generation import generate
from zeco.models.io import load_model, save_model

__all__ = [
    "CausalLM",
    "ModelConfig",
    "States",
    "count_parameters",
    "gather_states",
    "generate",
    "load_model",
    "save_model",
]
