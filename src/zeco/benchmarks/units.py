"""Rates and times as one writes them on a command line."""

from __future__ import annotations

import re

from zeco.core.errors import ArgumentError

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rate(text: str) -> float:
    """Return bits per second.

    >>> parse_rate("200mbit")
    200000000.0
    """
    return _parse(text, _RATES, "rate", "200mbit or 1gbit")


def parse_time(text: str) -> float:
    """Return seconds.

    >>> parse_time("5ms")
    0.005
    """
    return _parse(text, _TIMES, "time", "500us or 5ms")


def parse_numbers(text: str, name: str) -> tuple[int, ...]:
    """Return positive whole numbers, written with commas between.

    >>> parse_numbers("2,4,8", "ranks")
    (2, 4, 8)
    """
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ArgumentError(f"--{name} {text!r}: give whole numbers of at least 1, such as 2,4,8")
    return found


def parse_shape(text: str) -> tuple[int, int, int]:
    """Return heads, key dim and value dim of a state.

    >>> parse_shape("16x128x128")
    (16, 128, 128)
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ArgumentError(f"--state {text!r}: give heads x keys x values, such as 16x128x128")
    H, K, V = (int(part) for part in match.groups())
    return H, K, V


def _parse(text: str, units: dict[str, float], what: str, example: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    if match is None or match[2] not in units or float(match[1]) == 0:
        raise ArgumentError(
            f"{what} {text!r} isn't a positive number with a unit ({', '.join(units)}); "
            f"write it as {example}"
        )
    return float(match[1]) * units[match[2]]
