"""What ``zeco doctor`` finds, and what it says of a fault."""

from __future__ import annotations

import pytest
import torch

from zeco.cli import doctor
from zeco.cli.main import main
from zeco.testing import examination
from zeco.testing.cases import CASES


def test_two_ranks_are_well(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--ranks", "2", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "2 ranks on cpu" in shown
    assert "all is well" in shown
    assert torch.__version__ in shown
    for name in CASES:
        assert name in shown
    # Why a faster backend wasn't taken is told.
    assert "not 'fla': the inputs are on cpu" in shown


def test_a_wrong_operator_is_named(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(doctor, "BOUND", -1.0)
    monkeypatch.setattr(examination, "CASES", {"gla": CASES["gla"]})
    assert main(["doctor", "--device", "cpu"]) == 1
    assert "wrong: gla" in capsys.readouterr().out


def test_no_ranks_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ranks", "0"]) == 2
    assert "--ranks 0: give at least 1" in capsys.readouterr().err
