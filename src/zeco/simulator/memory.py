"""What a scan's registers hold."""

from __future__ import annotations

from zeco.core.costs import Plan
from zeco.core.fabric import Load
from zeco.core.schedule import build_schedule
from zeco.core.steps import (
    ENTERING,
    OWN,
    AllGather,
    Combine,
    Exchange,
    Form,
    Receive,
    Send,
    Step,
)


def held_bytes(plan: Plan, num_ranks: int, load: Load) -> float:
    """Return the most bytes that the registers of one rank hold when a scan ends.

    Nothing is freed before the scan is over, as in the runtime.

    Args:
        plan: the scan.
        num_ranks: P.
        load: what a whole state weighs.
    """
    schedule = build_schedule(plan.algorithm, num_ranks, plan.num_blocks, nodes=plan.nodes)
    sizes = {Form.STATE: load.state_bytes, Form.MAP: load.state_bytes + load.parameter_bytes}
    blocks = schedule.num_blocks
    most = 0.0
    for rank, program in enumerate(schedule.programs):
        values = {(OWN, block): Form.MAP for block in range(blocks)}
        if rank == schedule.first:
            values |= {(ENTERING, block): Form.STATE for block in range(blocks)}
        for step in program:
            _put(values, step)
        most = max(most, sum(sizes[form] for form in values.values()) / blocks)
    return most


def _put(values: dict[tuple[str, int], Form], step: Step) -> None:
    match step:
        case Combine(block, target, _, earlier):
            values[target, block] = values[earlier, block]
        case Receive(_, block, register, form):
            values[register, block] = form
        case Exchange(transfers):
            for transfer in transfers:
                _put(values, transfer)
        case AllGather(block, _, targets, forms):
            values.update({(t, block): form for t, form in zip(targets, forms, strict=True)})
        case Send():
            pass
