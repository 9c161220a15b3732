from __future__ import annotations

from pathlib import Path

import pytest

from zeco.core.errors import ConfigError
from zeco.training.config import TrainConfig
from zeco.training.config_file import load_config, to_toml


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_file_and_overrides_fill_nested_sections(tmp_path: Path) -> None:
    path = write(tmp_path, 'steps = 7\n[data]\nsuffixes = [".txt"]\n[optimizer]\nbeta1 = 0.5\n')
    config = load_config(
        TrainConfig,
        path,
        overrides=[
            "steps=9",
            "data.path=some/folder",
            "optimizer.clip_norm=none",
            "data.held_out=1e-1",
        ],
    )
    assert config.steps == 9
    assert config.data.suffixes == (".txt",)
    assert config.data.path == Path("some/folder")
    assert config.optimizer.beta1 == 0.5
    assert config.optimizer.clip_norm is None
    assert config.data.held_out == 0.1


def test_toml_round_trip(tmp_path: Path) -> None:
    config = load_config(
        TrainConfig,
        None,
        overrides=['data.suffixes=[".a", "b\\"c"]', "data.path=12", "eval_every=3"],
    )
    assert config.data.path == Path("12")
    assert load_config(TrainConfig, write(tmp_path, to_toml(config))) == config


@pytest.mark.parametrize(
    "text, message",
    [
        ("stepz = 3", "'stepz' does not exist: did you mean 'steps'"),
        ("[optimizer]\nlearning_rte = 1.0", "did you mean 'optimizer.learning_rate'"),
        (
            "learning_rate = 1.0",
            "'learning_rate' does not exist: did you mean 'optimizer.learning_rate'",
        ),
        ("[optimiser]\nbeta1 = 0.1", "'optimiser' does not exist: did you mean 'optimizer'"),
        ('steps = "many"', "steps = 'many' must be an integer"),
        ("steps = 1.5", "steps = 1.5 must be an integer"),
        ("steps = true", "steps = True must be an integer"),
        ("[optimizer]\nbeta1 = 'x'", "optimizer.beta1 = 'x' must be a number"),
        ("[optimizer]\nclip_norm = 'x'", "optimizer.clip_norm = 'x' must be a number or none"),
        ("[data]\nsuffixes = [1]", r"data.suffixes = \[1\] must be a list, each entry a string"),
        ("data = 3", "data is a section, got 3"),
        ('dtype = "float23"', "dtype = 'float23' does not exist: did you mean 'float32'"),
        ("steps = 0", "steps = 0 must be at least 1"),
        ("batch_size = 3\naccumulation = 2", "batch_size = 3 must be a multiple of"),
        ("[data]\nnum_keys = 2", "data.num_keys = 2 must be at least data.num_pairs=8"),
        ("steps = ", "isn't valid TOML"),
    ],
)
def test_errors_name_key_value_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(TrainConfig, write(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override, message",
    [
        ("steps", "must read section.key=value"),
        ("steps=none", "steps = 'none' must be an integer"),
        ("optimizer.lerning_rate=1", "did you mean 'optimizer.learning_rate'"),
        ("data=x", "data is a section"),
    ],
)
def test_bad_overrides(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, None, overrides=[override])


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml can't be read"):
        load_config(TrainConfig, tmp_path / "nowhere.toml")
