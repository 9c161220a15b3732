"""Do the ranks agree on what they are about to do? Asked only where ``check`` is on: it costs a hop."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from zeco.collectives.transport import Transport
from zeco.core.errors import ArgumentError

PURPOSE = "check"
MESSAGE_BYTES = 1024


def check_agreement(transport: Transport, where: str, fields: Mapping[str, object]) -> None:
    """Raise the same error on every rank if one's fields differ from another's.

    Args:
        transport: this rank's end of the group.
        where: the function that is about to run, for the message.
        fields: what must be the same everywhere, such as shapes and dtypes.

    Raises:
        ArgumentError: naming the fields, their values and the ranks that hold them.
    """
    if transport.size == 1:
        return
    mine = json.dumps({name: str(value) for name, value in fields.items()}).encode()
    if len(mine) > MESSAGE_BYTES:
        raise ArgumentError(f"{where}: the fields to compare take over {MESSAGE_BYTES} bytes")
    padded = mine.ljust(MESSAGE_BYTES)
    message = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    found = transport.all_gather(message, transport.next_tags(), PURPOSE)
    everyone = [json.loads(bytes(m.tolist())) for m in found]
    problems: list[str] = []
    for name in sorted({name for one in everyone for name in one}):
        values: dict[str, list[int]] = {}
        for rank, one in enumerate(everyone):
            values.setdefault(one.get(name, "missing"), []).append(rank)
        if len(values) > 1:
            held = ", ".join(f"{value} on ranks {ranks}" for value, ranks in values.items())
            problems.append(f"{name} is {held}")
    if problems:
        raise ArgumentError(
            f"{where}: the ranks disagree: {'; '.join(problems)}; call it alike on every rank"
        )
