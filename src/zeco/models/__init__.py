"""Language models built of linear-attention layers."""

from __future__ import annotations

from zeco.models.backbone import States, count_parameters
from zeco.models.causal_lm import CausalLM, gather_states
from zeco.models.config import ModelConfig
from zeco.models.encoder import Encoder, mask_tokens, masked_lm_loss
from zeco.models.generation import generate
from zeco.models.io import load_model, save_model

__all__ = [
    "CausalLM",
    "Encoder",
    "ModelConfig",
    "States",
    "count_parameters",
    "gather_states",
    "generate",
    "load_model",
    "mask_tokens",
    "masked_lm_loss",
    "save_model",
]
