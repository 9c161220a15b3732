"""The rooms: who may import whom, nothing in circles, no module too long."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "zeco"
MAX_LINES = 400

CORE = {"core"}
BELOW_METHODS = CORE | {"operators", "collectives"}
BELOW_LAYERS = BELOW_METHODS | {"sequence_parallel"}
BELOW_TRAINING = BELOW_LAYERS | {"layers", "models", "integrations", "kernels"}

MAY_IMPORT = {
    "core": set(),
    "kernels": CORE,
    "simulator": CORE,
    "collectives": CORE | {"kernels"},
    "operators": CORE | {"kernels"},
    "sequence_parallel": BELOW_METHODS,
    "layers": BELOW_LAYERS,
    "models": BELOW_LAYERS | {"layers"},
    "integrations": BELOW_LAYERS | {"layers"},
    "testing": BELOW_LAYERS | {"ops"},
    "benchmarks": BELOW_TRAINING | {"simulator", "testing", "ops"},
    "training": BELOW_TRAINING | {"benchmarks"},
    "cli": {"core", "training", "benchmarks", "simulator", "testing", "models"},
    "ops": {"operators"},
    "": BELOW_LAYERS | {"ops"},
}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported_modules(path: Path) -> list[tuple[str, bool]]:
    """Return the package's modules that a file imports, and whether only when they are used."""
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, (ast.FunctionDef, ast.AsyncFunctionDef)) or _for_types(block)
        for node in ast.walk(block)
    }
    found: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "zeco":
                found += [(f"zeco.{alias.name}", id(node) in inside) for alias in node.names]
            else:
                found.append((node.module, id(node) in inside))
    return [(name, nested) for name, nested in found if name.split(".")[0] == "zeco"]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_arrows(path):
    room = room_of(path)
    for name, nested in imported_modules(path):
        target = name.split(".")[1] if "." in name else ""
        if target == room:
            continue
        assert target in MAY_IMPORT[room], f"{path.name} in {room!r} imports {name}"
        if target == "kernels" and room in ("operators", "collectives"):
            assert nested, f"{path.name} imports {name} outside of a function"


def test_every_room_is_listed():
    rooms = {p.name for p in SOURCE.iterdir() if p.is_dir() and not p.name.startswith("__")}
    assert rooms == MAY_IMPORT.keys() - {"", "ops"}


def test_no_circles_between_rooms():
    done: set[str] = set()

    def visit(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, f"circle: {' -> '.join([*path, room])}"
        if room not in done:
            for target in MAY_IMPORT[room]:
                visit(target, (*path, room))
            done.add(room)

    for room in MAY_IMPORT:
        visit(room, ())


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_length(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_operators_and_kernels_know_no_distribution():
    for room in ("operators", "kernels", "core", "simulator"):
        for path in (SOURCE / room).rglob("*.py"):
            assert "torch.distributed" not in path.read_text(), path


def test_importing_has_no_side_effects():
    """Nothing optional, slow or distributed starts with ``import zeco``."""
    code = (
        "import sys, threading, zeco\n"
        "assert threading.active_count() == 1\n"
        "assert not {'triton', 'transformers', 'matplotlib', 'tyro', 'rich'} & sys.modules.keys()\n"
        "import torch; assert not torch.distributed.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
