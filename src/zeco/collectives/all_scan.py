"""All-Scan as users call it: differentiable, at once or in two halves around other work.

Every rank holds an affine map of states, ``leaving = transition(entering) + update``. All-Scan hands
every rank the state that enters it (and the one that leaves it):

    S[0] = initial,   S[p+1] = T_p(S[p]) + U_p,   rank p gets (S[p], S[p+1]).

Its adjoint is a scan in the other direction. With dE_p and dL_p the gradients that reach rank p's
two results, X_p what the later ranks send back, and R_p = X_p + dL_p:

    X[P-1] = 0,   X[p-1] = T_pᵀ(R_p) + dE_p,
    dU_p = R_p,   dT_p = R_p S_pᵀ (its diagonal or its trace, for those kinds),   dinitial = X[-1].

Source: ZeCO (arXiv:2507.01004), section 3; the transposed transitions and dense kinds go beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeco.collectives.groups import Group, transport_of
from zeco.collectives.recompute import Slot, take_slot
from zeco.collectives.scan import BACKWARD, ScanHandle, start_scan
from zeco.collectives.transport import Transport
from zeco.core.errors import ArgumentError
from zeco.core.maps import AffineMap
from zeco.core.shapes import check_floating, check_same_device, check_shapes
from zeco.core.transitions import Identity, Transition


@dataclass(frozen=True, eq=False)
class _Kept:
    """A scan of an earlier run of a checkpointed region, whose results are on its tape."""

    entering: Tensor
    leaving: Tensor

    def wait_for_both(self) -> tuple[Tensor, Tensor]:
        """Return the results."""
        return self.entering, self.leaving


class _Call:
    """What the two halves of a scan and of its adjoint share."""

    def __init__(
        self,
        transport: Transport,
        transition: Transition,
        *,
        reverse: bool,
        algorithm: str,
        num_blocks: int | None,
    ) -> None:
        self.transport = transport
        self.transition = transition
        self.options: dict[str, Any] = {"algorithm": algorithm, "num_blocks": num_blocks}
        self.reverse = reverse
        self.slot: Slot | None = take_slot()
        self.forward_scan: ScanHandle | _Kept | None = None
        self.backward_scan: ScanHandle | None = None
        self.d_leaving: Tensor | None = None
        self.entering: Tensor | None = None
        self.needs_d_initial = False

    @property
    def is_first(self) -> bool:
        """Whether the direction of travel begins at this rank."""
        return self.transport.rank == (self.transport.size - 1 if self.reverse else 0)


class _StartFunction(torch.autograd.Function):
    """Start the scan forwards; backwards, wait for the reverse scan."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, update: Tensor, initial: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        kept = None if call.slot is None else call.slot.read()
        if kept is not None:
            call.forward_scan = _Kept(kept[0], kept[1])
        else:
            call.forward_scan = start_scan(
                call.transport,
                AffineMap(update, call.transition.with_parameters(parameters)),
                initial if call.is_first else None,
                reverse=call.reverse,
                **call.options,
            )
        call.needs_d_initial = call.is_first and ctx.needs_input_grad[2]
        ctx.call = call
        ctx.save_for_backward(*parameters)
        # What ties the two halves together for autograd; it carries no data.
        return update.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_token: Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        scan, entering, d_leaving = call.backward_scan, call.entering, call.d_leaving
        if scan is None or entering is None or d_leaving is None:
            raise RuntimeError("the adjoint of all_scan_start ran before that of wait")
        arrived, d_initial = scan.wait()
        d_update = arrived + d_leaving
        transition = call.transition.with_parameters(ctx.saved_tensors)
        d_parameters = transition.gradient(d_update, entering)
        call.backward_scan = call.entering = call.d_leaving = None
        return None, d_update, d_initial, *d_parameters


class _WaitFunction(torch.autograd.Function):
    """Wait for the scan forwards; backwards, start the reverse scan."""

    @staticmethod
    def forward(ctx: Any, call: _Call, token: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        scan = call.forward_scan
        if scan is None:
            raise ArgumentError("wait() was called twice on one handle; keep the first result")
        call.forward_scan = None
        entering, leaving = scan.wait_for_both()
        if call.slot is not None:
            call.slot.write(entering, leaving)
        ctx.call = call
        ctx.save_for_backward(entering, *parameters)
        return entering, leaving

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_entering: Tensor, d_leaving: Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        call.entering, *parameters = ctx.saved_tensors
        call.d_leaving = d_leaving
        transition = call.transition.with_parameters(tuple(parameters))
        own = AffineMap(d_entering, transition).adjoint(d_entering, d_leaving)
        # What leaves this scan at its last rank, where the forward one began, is dinitial.
        call.backward_scan = start_scan(
            call.transport,
            own,
            reverse=not call.reverse,
            purpose=BACKWARD,
            output_leaving=call.needs_d_initial,
            **call.options,
        )
        return None, d_entering.new_empty(0), *[None for _ in parameters]


class AllScanHandle:
    """An All-Scan under way; see `all_scan_start`."""

    def __init__(self, call: _Call, token: Tensor) -> None:
        self._call = call
        self._token = token

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return (entering, leaving) [B, H, K, V] as soon as they are there.

        Raises:
            ArgumentError: called twice.
            RankFailedError: another rank failed, or didn't come within the group's timeout.
        """
        parameters = [p.detach() for p in self._call.transition.parameters]
        return _WaitFunction.apply(self._call, self._token, *parameters)


def all_scan_start(
    update: Tensor,
    transition: Transition | None = None,
    *,
    group: Group = None,
    initial: Tensor | None = None,
    reverse: bool = False,
    algorithm: str = "auto",
    num_blocks: int | None = None,
) -> AllScanHandle:
    """Start an All-Scan and return at once; ``wait()`` of the result gives (entering, leaving).

    Under autograd the overlap is mirrored: ``wait``'s adjoint starts the reverse scan, and the
    adjoint of this function waits for it.

    Takes the arguments of `all_scan`, and raises what it raises.
    """
    transport = transport_of(group)
    try:
        transition = Identity() if transition is None else transition
        _check(transport, update, transition, initial)
        call = _Call(
            transport, transition, reverse=reverse, algorithm=algorithm, num_blocks=num_blocks
        )
        token = _StartFunction.apply(call, update, initial, *transition.parameters)
    except Exception as error:
        transport.report_failure(error)
        raise
    return AllScanHandle(call, token)


def all_scan(
    update: Tensor,
    transition: Transition | None = None,
    *,
    group: Group = None,
    initial: Tensor | None = None,
    reverse: bool = False,
    algorithm: str = "auto",
    num_blocks: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Hand every rank the state that enters it and the one that leaves it.

    Every rank of the group calls this with the same shapes, kind of transition and options.
    Differentiable in ``update``, the transition's parameters and ``initial``.

    Args:
        update: [B, H, K, V], fp32 or fp64: this rank's update from a zero state.
        transition: this rank's linear map of the entering state; None is `Identity`.
        group: a process group, a 1-D device mesh, or None for the default group.
        initial: state [B, H, K, V] that enters the first rank in the direction of travel; None for
            zeros. The other ranks may pass it too; only the first one's is used.
        reverse: whether the state travels from the last rank to the first.
        algorithm: ``"chain"`` (pipelined, one state sent a rank), ``"serial"`` (the same in one
            block), ``"gather"`` (all-gather of the maps), ``"doubling"`` (log2 P rounds of maps),
            ``"two_level"`` or ``"two_level_doubling"`` (inside nodes, then between them, the state
            cut over each node's ranks), ``"device_chain"`` (the chain inside CUDA kernels of one host,
            without its CPUs), or ``"auto"``: the cost model chooses.
        num_blocks: pipeline blocks; None lets the cost model choose. ``"device_chain"`` has its own.

    Returns:
        (entering, leaving), both [B, H, K, V].

    Raises:
        ArgumentError: a shape, dtype, device or name that doesn't fit.
        GroupError: this process isn't in the group, or an earlier failure broke it.
        RankFailedError: another rank failed, or didn't come within the group's timeout.
            ``"device_chain"`` notices on the GPU, where its states turn NaN; the host raises when it
            looks next, in a later scan or collective of the group.
        UnsupportedError: ``"device_chain"`` where it can't run: on CPUs, over several hosts, on GPUs
            without access to each other's memory, or with more ranks on one GPU than it holds at once.

    Source: ZeCO's All-Scan (arXiv:2507.01004, section 3).

    >>> import torch, zeco
    >>> entering, leaving = zeco.all_scan(torch.ones(1, 1, 2, 2))  # a single rank
    >>> float(entering.sum()), float(leaving.sum())
    (0.0, 4.0)
    """
    return all_scan_start(
        update,
        transition,
        group=group,
        initial=initial,
        reverse=reverse,
        algorithm=algorithm,
        num_blocks=num_blocks,
    ).wait()


def _check(
    transport: Transport, update: Tensor, transition: Transition, initial: Tensor | None
) -> None:
    check_shapes("all_scan", {"update": (update, "B H K V"), "initial": (initial, "B H K V")})
    check_floating("all_scan", {"update": update, "initial": initial})
    check_same_device("all_scan", {"update": update, "initial": initial})
    if update.element_size() < 4:
        raise ArgumentError(
            f"all_scan: update has dtype {update.dtype}, but states are fp32 or fp64 so that they "
            "stay exact over many ranks; cast it with .float()"
        )
    if initial is not None and initial.dtype != update.dtype:
        raise ArgumentError(
            f"all_scan: initial has dtype {initial.dtype}, but update has {update.dtype}; cast it"
        )
    transition.check(update)
