from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeco.cli.demo import Outcome
from zeco.cli.main import COMMANDS, main
from zeco.core.errors import ConfigError
from zeco.training.baselines import Baselines

CONFIG = """
steps = 2
batch_size = 1
sequence_length = 32
device = "cpu"

[data]
eval_bytes = 64
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("a text that says the same again and again; " * 50)
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


def arguments(config: Path, *more: str) -> list[str]:
    folder = config.parent
    data = ["--data", str(folder / "text.txt"), "--out", str(folder / "run")]
    return ["train", str(config), *data, *more]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize(
    "given, message",
    [
        (["trian"], "command 'trian' does not exist: did you mean 'train'?"),
        (["train", "nowhere.toml"], "config file nowhere.toml can't be read"),
        (["generate", "nowhere"], "nowhere holds no checkpoint"),
        (["demo", "--config", "nowhere.toml"], "config file nowhere.toml can't be read"),
    ],
)
def test_wrong_use_is_one_line(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    "more, message",
    [
        (["--override", "optimizer.learning_rte=1"], "did you mean 'optimizer.learning_rate'"),
        (["--override", "data.path=/nowhere/at/all"], "/nowhere/at/all does not exist"),
        (["--override", "sequence_length=5000"], "fewer than sequence_length = 5000"),
        (["--ranks", "3", "--override", "parallel.data_ranks=1", "batch_size=0"], "batch_size = 0"),
    ],
)
def test_wrong_configurations_are_one_line(
    config: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(config, *more)) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_debug_raises(config: Path) -> None:
    with pytest.raises(ConfigError):
        main([*arguments(config, "--override", "stepz=1"), "--debug"])


@pytest.mark.timeout(120)
def test_an_error_of_a_rank_is_one_line(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = ["--ranks", "2", "--override", "parallel.method=zecco"]
    assert main(arguments(config, *wrong)) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("zeco:")]
    assert len(errors) == 1
    assert "zecco" in errors[0]


@pytest.mark.timeout(120)
def test_train_then_generate(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record = config.parent / "record.json"
    assert main(arguments(config, "--ranks", "2", "--record", str(record))) == 0
    figures = json.loads(record.read_text())["figures"]
    assert figures["ranks_per_sequence"] == 2
    assert figures["steps"] == 2
    assert 0 <= figures["wait_share"] < 1
    capfd.readouterr()
    texts: list[str] = []
    for seed in ("1", "1", "2"):
        run = ["generate", str(config.parent / "run"), "--prompt", "a text", "--seed", seed]
        assert main([*run, "--max-new-tokens", "30"]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("a text") for text in texts)


def test_demo_judges_losses_and_bits() -> None:
    baselines = Baselines(own_frequencies=4.5, train_frequencies=4.6, gzip=2.0)
    assert not Outcome([1.0, 2.0], [1.0, 2.0 + 1e-5], 3.0, baselines).failures
    assert "differ by" in Outcome([1.0], [1.1], 3.0, baselines).failures[0]
    assert "differ by" in Outcome([1.0], [float("nan")], 3.0, baselines).failures[0]
    assert "don't beat" in Outcome([1.0], [1.0], 4.5, baselines).failures[0]
    assert "don't beat" in Outcome([1.0], [1.0], float("nan"), baselines).failures[0]
