"""What the documentation says, run."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

import zeco
from zeco.cli.main import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def code_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", ["tutorial.md", "how-to/add-an-operator.md"])
def test_the_code_of_a_page_runs(page):
    blocks = code_of(page)
    assert len(blocks) >= 2
    # Dataclasses look their module up.
    module = types.ModuleType("page")
    sys.modules["page"] = module
    try:
        exec(compile("\n".join(blocks), page, "exec"), module.__dict__)
    finally:
        del sys.modules["page"]


def test_an_operator_takes_under_60_lines():
    assert len(code_of("how-to/add-an-operator.md")[0].splitlines()) < 60


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"make (\w+)", README))
    assert {"demo", "test", "check", "long"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`zeco (\w+)[ `]", README))))
def test_commands_of_the_readme_exist(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out.lower()


def test_names_of_the_readme_exist():
    for name in re.findall(r"zeco\.([a-zA-Z_]+)\(", README):
        assert hasattr(zeco, name), name
    listed = re.search(r"`zeco\.ops`: (.*?)\.", README, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == set(zeco.ops.__all__)


def test_rooms_of_the_readme_exist():
    for room in re.findall(r"^  (\w+)/ ", README, re.MULTILINE):
        assert (ROOT / "src" / "zeco" / room).is_dir(), room


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
