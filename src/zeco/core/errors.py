"""The package's own errors: each says what came, what is accepted and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ZecoError(Exception):
    """Base class of every error that this package raises on purpose."""


class ArgumentError(ZecoError, ValueError):
    """An argument has a wrong value, shape, dtype or device."""


class BackendError(ZecoError, RuntimeError):
    """A backend's kernels give wrong numbers with what is installed here."""


class ConfigError(ArgumentError):
    """A configuration file or override names an unknown key or holds an unusable value."""


class GroupError(ZecoError, RuntimeError):
    """A process group cannot be used: this process is outside it, or it is broken."""


class RankFailedError(ZecoError, RuntimeError):
    """Another rank raised while this one was waiting for it."""


class ScheduleError(ZecoError, ValueError):
    """A schedule would deadlock, lose a block, or combine maps in a wrong order."""


class UnsupportedError(ZecoError, NotImplementedError):
    """The combination of options is not offered; the message names one that is."""


def unknown_name(kind: str, name: object, accepted: Iterable[str]) -> str:
    """Return the message for a name that does not exist, proposing the nearest that does.

    >>> unknown_name("method", "zecco", ["zeco", "lasp1"])
    "method 'zecco' does not exist: did you mean 'zeco'? Accepted: lasp1, zeco"
    """
    names = sorted(accepted)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f" did you mean '{near[0]}'?" if near else ""
    return f"{kind} {name!r} does not exist:{hint} Accepted: {', '.join(names)}"
