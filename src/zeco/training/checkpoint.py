"""Checkpoints: the model to use, and all that is needed to go on training.

A folder ``step-000200`` holds the model as `zeco.models` writes it, ``optimizer.safetensors`` and
``training.json``. They are whole, however the parameters were cut over the ranks, so any number of
ranks can go on; rank 0 writes alone. A folder has its name only once it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from zeco.core.errors import ArgumentError
from zeco.models import CausalLM
from zeco.models.io import load_model, save_weights
from zeco.training.sharding import cut_like, join_parts

_PREFIX = "step-"


def save_checkpoint(
    folder: Path,
    model: CausalLM,
    optimizer: torch.optim.AdamW,
    *,
    step: int,
    config_toml: str,
    writes: bool,
) -> Path | None:
    """Write a checkpoint on one rank and return its folder, None on the others; all call this.

    Args:
        folder: where checkpoints of the run lie.
        model: the model.
        optimizer: its optimizer.
        step: steps done.
        config_toml: the run's configuration, kept beside the model for the reader.
        writes: whether this is the rank that does.
    """
    weights = _gather(model.state_dict().items(), writes=writes)
    moments = _gather(_moments(model, optimizer), writes=writes)
    if not writes:
        return None
    complete = folder / f"{_PREFIX}{step:06d}"
    unfinished = folder / f".unfinished-{complete.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_weights(model.config, weights, unfinished)
    save_file(moments, unfinished / "optimizer.safetensors")
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
    model.load_state_dict(
        {name: cut_like(saved[name], x) for name, x in model.state_dict().items()}
    )
    moments = load_file(folder / "optimizer.safetensors")
    for name, p in _trained(model):
        state: dict[str, Tensor] = {
            kind: cut_like(moments[f"{kind}.{name}"], p) for kind in ("exp_avg", "exp_avg_sq")
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
            yield f"{kind}.{name}", value


def _gather(tensors: Iterable[tuple[str, Tensor]], *, writes: bool) -> dict[str, Tensor]:
    """Put tensors together that are cut over the ranks; the writer keeps them."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors:
        joined = join_parts(tensor)
        if writes:
            found[name] = joined.cpu().contiguous()
    return found
