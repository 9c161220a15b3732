"""Checkpoints: the model to use, and all that is needed to go on training.

A folder ``step-000200`` holds the model as `zeco.models` writes it, ``optimizer.safetensors`` and
``training.json``. Parameters are the same on every rank, so rank 0 writes alone and any number of
ranks can go on. A folder has its name only once it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from zeco.core.errors import ArgumentError
from zeco.models import CausalLM
from zeco.models.io import load_model, save_model

_PREFIX = "step-"


def save_checkpoint(
    folder: Path, model: CausalLM, optimizer: torch.optim.AdamW, *, step: int, config_toml: str
) -> Path:
    """Write a checkpoint and return its folder; call it on one rank.

    Args:
        folder: where checkpoints of the run lie.
        model: the model.
        optimizer: its optimizer.
        step: steps done.
        config_toml: the run's configuration, kept beside the model for the reader.
    """
    complete = folder / f"{_PREFIX}{step:06d}"
    unfinished = folder / f".unfinished-{complete.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_model(model, unfinished)
    save_file(dict(_moments(model, optimizer)), unfinished / "optimizer.safetensors")
    (unfinished / "training.json").write_text(json.dumps({"step": step}) + "\n")
    (unfinished / "train.toml").write_text(config_toml, encoding="utf-8")
    if complete.exists():
        shutil.rmtree(complete)
    unfinished.rename(complete)
    return complete


def latest_checkpoint(folder: Path) -> Path:
    """Return the checkpoint of the most steps.

    Args:
        folder: a run's folder, or a checkpoint itself.

    Raises:
        ArgumentError: there is none.
    """
    if (folder / "training.json").is_file():
        return folder
    found = sorted(folder.glob(f"{_PREFIX}*/training.json"))
    if not found:
        raise ArgumentError(
            f"{folder} holds no checkpoint ({_PREFIX}NUMBER folder); check the path, or train first"
        )
    return max(found, key=lambda path: int(path.parent.name.removeprefix(_PREFIX))).parent


def load_checkpoint(folder: Path, model: CausalLM, optimizer: torch.optim.AdamW) -> int:
    """Bring a model and its optimizer to where a checkpoint stopped.

    Returns:
        The steps done.

    Raises:
        ArgumentError: the checkpoint's parameters have other names or shapes.
    """
    saved = load_model(folder).state_dict()
    for name, tensor in model.state_dict().items():
        if name not in saved or saved[name].shape != tensor.shape:
            came = list(saved[name].shape) if name in saved else "missing"
            raise ArgumentError(
                f"checkpoint {folder}: {name} is {came}, but the configuration's model has "
                f"{list(tensor.shape)}; resume with the configuration in {folder / 'train.toml'}"
            )
    model.load_state_dict(saved)
    moments = load_file(folder / "optimizer.safetensors")
    for name, p in _trained(model):
        state: dict[str, Tensor] = {
            kind: moments[f"{kind}.{name}"].to(p.device) for kind in ("exp_avg", "exp_avg_sq")
        }
        # AdamW keeps its count of steps on the CPU.
        state["step"] = moments[f"step.{name}"].cpu()
        optimizer.state[p] = state
    return int(json.loads((folder / "training.json").read_text())["step"])


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _moments(model: nn.Module, optimizer: torch.optim.AdamW) -> Iterator[tuple[str, Tensor]]:
    for name, p in _trained(model):
        for kind, value in optimizer.state[p].items():
            yield f"{kind}.{name}", value.contiguous()
