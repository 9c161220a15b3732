"""Dataclasses from TOML files and ``a.b=c`` overrides, with one-line errors that name the key.

Knows no particular configuration: any tree of dataclasses will do, with fields of type bool, int,
float, str, Path, a Literal, a tuple of these, or optional forms of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from zeco.core.errors import ArgumentError, ConfigError, unknown_name

C = TypeVar("C")


def load_config(config_type: type[C], path: Path | None, *, overrides: Sequence[str] = ()) -> C:
    """Read a configuration.

    Args:
        config_type: the dataclass to fill; tables of the file are its nested dataclasses.
        path: a TOML file, or None to start from the defaults.
        overrides: ``section.key=value`` each, later ones win. The value is TOML, or a bare string;
            ``none`` stands for the absence of an optional value.

    Raises:
        ConfigError: the file is missing or no TOML, a key is unknown (the nearest one is
            proposed) or missing, a value has a wrong type.
    """
    table = {} if path is None else read_toml(path)
    for override in overrides:
        _apply_override(table, override)
    return cast("C", _build(config_type, table, config_type, ""))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or say in one line why it can't be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"config file {path} can't be read: {reason}; check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} isn't valid TOML: {error}") from error


def to_toml(config: Any, *, section: str = "") -> str:
    """Write a configuration as TOML that `load_config` reads back; absent optionals are left out.

    >>> from dataclasses import make_dataclass
    >>> print(to_toml(make_dataclass("Small", [("width", int)])(3)))
    width = 3
    <BLANKLINE>
    """
    lines: list[str] = []
    nested: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{section}.{field.name}" if section else field.name
        if dataclasses.is_dataclass(value):
            nested.append(f"\n[{name}]\n{to_toml(value, section=name)}")
        elif value is not None:
            lines.append(f"{field.name} = {_toml_value(value)}\n")
    return "".join(lines + nested)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(v) for v in cast("Sequence[Any]", value)) + "]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'


def _apply_override(table: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} must read section.key=value")
    for depth, key in enumerate(keys[:-1], start=1):
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(keys[:depth])} is no section")
        table = cast("dict[str, Any]", inner)
    table[keys[-1]] = _Bare(text.strip())


class _Bare(str):
    """The text of an override: TOML if it can be read as such and fits, else a string."""

    __slots__ = ()

    def parse(self) -> Any:
        try:
            return tomllib.loads(f"value = {self}")["value"]
        except tomllib.TOMLDecodeError:
            return str(self)


def _build(config_type: Any, table: Mapping[str, Any], root: Any, where: str) -> Any:
    hints = get_type_hints(config_type)
    fields = {f.name: f for f in dataclasses.fields(config_type)}
    for key in table:
        if key not in fields:
            raise ConfigError(_unknown_key(where, key, list(fields), root))
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in table:
            values[name] = _convert(table[name], hints[name], root, where + name)
        elif _is_required(field):
            raise ConfigError(f"config key {where + name} is missing, but has no default; set it")
    try:
        return config_type(**values)
    except ConfigError:
        raise
    except ArgumentError as error:
        raise ConfigError(f"config section {where.rstrip('.') or 'root'}: {error}") from error


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _unknown_key(where: str, key: str, siblings: list[str], root: Any) -> str:
    """Propose the nearest key: of the same section first, else of the same name elsewhere."""
    everywhere = list(_key_names(root, ""))
    if not difflib.get_close_matches(key, siblings, n=1, cutoff=0.6):
        leaves = {name.rpartition(".")[2]: name for name in everywhere}
        near = difflib.get_close_matches(key, leaves, n=1, cutoff=0.75)
        if near:
            return f"config key {where + key!r} does not exist: did you mean {leaves[near[0]]!r}?"
    return unknown_name("config key", where + key, [where + s for s in siblings])


def _key_names(config_type: Any, where: str) -> Iterator[str]:
    hints = get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        yield where + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _key_names(hints[field.name], f"{where}{field.name}.")


def _convert(value: Any, accepted: Any, root: Any, key: str) -> Any:
    if dataclasses.is_dataclass(accepted):
        if not isinstance(value, dict):
            raise ConfigError(f"config key {key} is a section, got {value!r}; set {key}.NAME")
        return _build(accepted, cast("dict[str, Any]", value), root, key + ".")
    for candidate in _readings(value):
        fits, converted = _fit(candidate, accepted)
        if fits:
            return converted
    if get_origin(accepted) is Literal:
        raise ConfigError(unknown_name(f"{key} =", value, map(str, get_args(accepted))))
    raise ConfigError(f"config key {key} = {value!r} must be {_describe(accepted)}")


def _readings(value: Any) -> list[Any]:
    """The values that a TOML value or an override's text may stand for, the likeliest first."""
    if not isinstance(value, _Bare):
        return [value]
    readings = [value.parse(), str(value)]
    return [None, *readings] if value.lower() == "none" else readings


def _fit(value: Any, accepted: Any) -> tuple[bool, Any]:
    """Return whether a value is of the accepted type, and the value as that type."""
    origin, arguments = get_origin(accepted), get_args(accepted)
    if origin is Literal:
        return value in arguments, value
    if origin in (Union, types.UnionType):
        for option in arguments:
            fits, converted = _fit(value, option)
            if fits:
                return True, converted
        return False, value
    if origin is tuple:
        if not isinstance(value, list):
            return False, value
        fitted = [_fit(v, arguments[0]) for v in cast("list[Any]", value)]
        return all(fits for fits, _ in fitted), tuple(v for _, v in fitted)
    if accepted is types.NoneType or accepted is None:
        return value is None, None
    if accepted is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number, float(value) if number else value
    if accepted is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if accepted is Path:
        return isinstance(value, str), Path(value) if isinstance(value, str) else value
    return isinstance(value, accepted), value


_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def _describe(accepted: Any) -> str:
    origin, arguments = get_origin(accepted), get_args(accepted)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(a) for a in arguments)
    if origin is tuple:
        return f"a list, each entry {_describe(arguments[0])}"
    if accepted is types.NoneType:
        return "none"
    return "a path" if accepted is Path else _NAMES.get(accepted, str(accepted))
