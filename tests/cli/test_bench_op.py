from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeco.cli.main import main

SIZES = ["--tokens", "70", "--heads", "2", "--key-dim", "8", "--value-dim", "8"]
QUICK = [*SIZES, "--dtype", "float32", "--device", "cpu", "--repetitions", "2"]


def test_figures_table_and_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "op.json"
    ranks = ["--one-gpu-ranks", "3"]
    assert main(["bench", "op", "gla", *QUICK, *ranks, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["command"].startswith("zeco bench op gla --tokens 70")
    figures = record["figures"]
    assert figures["shape_BTHKV"] == [1, 70, 2, 8, 8]
    assert figures["added_by_a_middle_rank"]["ranks"] == 3
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "on a CPU: no CUDA graphs" in shown
    assert "d_initial_state" in shown


def test_strong_decay_of_a_delta_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "op", "gated_delta_rule", *QUICK, "--strong", "--peer", "none"]) == 0
    shown = capsys.readouterr().out
    assert "strong decay" in " ".join(shown.split())
    assert "no peer" not in shown


def test_bounded_decays_of_rwkv7(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "op.json"
    bounded = ["--lower-bound", "-0.5", "--passes", "forward", "--out", str(out)]
    assert main(["bench", "op", "rwkv7", *QUICK, *bounded]) == 0
    figures = json.loads(out.read_text())["figures"]
    assert {row["pass"] for row in figures["rows"]} == {"forward"}
    assert figures["gate"]["errors"]["zeco"].keys() == {"o", "final_state"}
    assert out.with_suffix(".png").exists()
    assert "fwd+bwd" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "given, message",
    [
        (["gal"], "operator 'gal' does not exist: did you mean 'gla'?"),
        (["gla", "--tokens", "0"], "--tokens 0: give at least 1"),
        (["gla", "--dtype", "bf16"], "--dtype: dtype 'bf16' does not exist"),
        (["gla", "--timing", "graph", "--device", "cpu"], "CUDA graphs need a CUDA device"),
        (["gla", "--repetitions", "0"], "--repetitions 0: give at least 1"),
        (["linear_attention", "--strong"], "--strong: linear_attention has no decay"),
        (["delta_rule", "--gates-dtype", "float32"], "--gates-dtype: delta_rule has no decay"),
        (["gla", *QUICK, "--peer", "fla"], "--peer fla:"),
        (["gla", "--lower-bound", "-1"], "--lower-bound -1.0: gla takes none"),
        (["rwkv7", "--lower-bound", "1"], "--lower-bound 1.0: give one below 0"),
    ],
)
def test_wrong_use_is_one_line(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "op", *given]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
