"""LASP-2's scan: everyone gets every map and folds those before it."""

from __future__ import annotations

from zeco.core.steps import ENTERING, LEAVING, OWN, AllGather, Combine, Form, Programs, Step


def gather(num_ranks: int, num_blocks: int) -> Programs:
    """LASP-2: all-gather the maps, then every rank folds those before it.

    Received by a rank: P - 1 maps. Serial steps: one all-gather.
    """
    # The first rank knows its entering state: what it contributes is a state already.
    forms = (Form.STATE, *[Form.MAP] * (num_ranks - 1))
    programs: Programs = []
    for rank in range(num_ranks):
        targets = [f"gathered{r}" for r in range(num_ranks)]
        if rank == 1:
            targets[0] = ENTERING
        steps: list[Step] = []
        for block in range(num_blocks):
            if rank == 0:
                steps.append(Combine(block, LEAVING, OWN, ENTERING))
            register = LEAVING if rank == 0 else OWN
            steps.append(AllGather(block, register, tuple(targets), forms))
            if rank == 0:
                continue
            prefix = targets[0]
            for earlier in range(1, rank):
                target = ENTERING if earlier == rank - 1 else f"prefix{earlier}"
                steps.append(Combine(block, target, targets[earlier], prefix))
                prefix = target
            steps.append(Combine(block, LEAVING, OWN, ENTERING))
        programs.append(steps)
    return programs
