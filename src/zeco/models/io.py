"""A model in a folder: ``config.json`` and ``model.safetensors``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from zeco.core.errors import ArgumentError, ConfigError, unknown_name
from zeco.models.causal_lm import CausalLM
from zeco.models.config import ModelConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def save_model(model: CausalLM, folder: Path) -> None:
    """Write a model into a folder, which is made if need be.

    Args:
        model: its parameters are written in their dtype.
        folder: files of the same names in it are replaced.
    """
    save_weights(model.config, model.state_dict(), folder)


def save_weights(config: ModelConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write what `save_model` writes, from the parts of a model.

    Args:
        config: of the model.
        weights: its parameters by name.
        folder: files of the same names in it are replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(config), indent=2)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(whole, folder / WEIGHTS_FILE)


def load_model(folder: Path, *, device: torch.device | str = "cpu") -> CausalLM:
    """Read a model that `save_model` wrote, in the dtype in which it was written.

    Args:
        folder: where it lies.
        device: where to put it.

    Raises:
        ArgumentError: a file is missing or unreadable, or its tensors aren't the config's.
        ConfigError: the config has unknown keys or unusable values.
    """
    config = _read_config(folder / CONFIG_FILE)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise ArgumentError(f"{path} does not exist; give a folder that save_model wrote")
    try:
        weights = load_file(path, device=str(device))
    except SafetensorError as error:
        raise ArgumentError(f"{path} is no readable safetensors file: {error}") from error
    with torch.device("meta"):
        model = CausalLM(config)
    expected = model.state_dict()
    problems = [f"{name} is missing" for name in expected if name not in weights]
    for name, tensor in weights.items():
        if name not in expected:
            problems.append(f"{name} is unknown")
        elif tensor.shape != expected[name].shape:
            wanted = list(expected[name].shape)
            problems.append(f"{name} has shape {list(tensor.shape)}, not {wanted}")
    if problems:
        raise ArgumentError(
            f"{path} does not fit {CONFIG_FILE} beside it: {'; '.join(problems)}. Restore the two "
            "files of one save_model call"
        )
    # The file's tensors lie where they happen to, and matmuls round by alignment: copies are aligned.
    aligned = {name: tensor.clone() for name, tensor in weights.items()}
    model.load_state_dict(aligned, assign=True)
    return model


def _read_config(path: Path) -> ModelConfig:
    if not path.is_file():
        raise ArgumentError(f"{path} does not exist; give a folder that save_model wrote")
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is no valid JSON: {error}") from error
    accepted = [field.name for field in dataclasses.fields(ModelConfig)]
    for key in values:
        if key not in accepted:
            raise ConfigError(f"{path}: " + unknown_name("config key", key, accepted))
    if "layers" in values:
        values["layers"] = tuple(values["layers"])
    return ModelConfig(**values)
