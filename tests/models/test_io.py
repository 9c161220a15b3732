from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from zeco.core.errors import ArgumentError, ConfigError
from zeco.models import CausalLM, ModelConfig, load_model, save_model
from zeco.models.registry import MIXERS

CONFIG = ModelConfig(vocab_size=11, width=8, num_layers=2, num_heads=2, layers=("gla", "retention"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_round_trip_is_exact(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    config = ModelConfig(vocab_size=11, width=8, num_layers=1, num_heads=2, tie_embeddings=tied)
    model = CausalLM(config, seed=0).to(dtype)
    save_model(model, tmp_path / "made" / "here")
    loaded = load_model(tmp_path / "made" / "here")
    ids = torch.arange(7)[None]
    assert loaded.config == config
    assert torch.equal(loaded(ids), model(ids))
    assert all(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_comes_back(tmp_path: Path, name: str) -> None:
    config = ModelConfig(vocab_size=11, width=8, num_layers=2, num_heads=2, layers=(name,))
    model = CausalLM(config, seed=0)
    save_model(model, tmp_path)
    ids = torch.arange(7)[None]
    assert torch.equal(load_model(tmp_path)(ids), model(ids))


def saved(folder: Path) -> Path:
    save_model(CausalLM(CONFIG, seed=0), folder)
    return folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    (saved(tmp_path) / name).unlink()
    with pytest.raises(ArgumentError, match=f"{name} does not exist"):
        load_model(tmp_path)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (saved(tmp_path) / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ArgumentError, match="no readable safetensors"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="no valid JSON"):
        load_model(tmp_path)


def test_config_typos_are_named(tmp_path: Path) -> None:
    path = saved(tmp_path) / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "witdh": 8}))
    with pytest.raises(ConfigError, match="'witdh' does not exist: did you mean 'width'"):
        load_model(tmp_path)


def test_every_tensor_that_does_not_fit_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    weights = load_file(path)
    weights["norms.weight"] = weights.pop("norm.weight")
    weights["embedding.weight"] = weights["embedding.weight"][:5].clone()
    save_file(weights, path)
    with pytest.raises(ArgumentError) as caught:
        load_model(tmp_path)
    message = str(caught.value)
    assert "norm.weight is missing" in message
    assert "norms.weight is unknown" in message
    assert "embedding.weight has shape [5, 8], not [11, 8]" in message
