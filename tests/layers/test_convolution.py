from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zeco import SequenceParallel
from zeco.core.errors import ArgumentError
from zeco.layers import ShortConvolution
from zeco.testing import run_ranks

CHANNELS = 5
WIDTHS = (1, 2, 4)


def make(width: int, *, bias: bool = True) -> ShortConvolution:
    torch.manual_seed(width)
    convolution = ShortConvolution(CHANNELS, width, bias=bias).double()
    if convolution.bias is not None:
        torch.nn.init.normal_(convolution.bias)
    return convolution


def tokens(length: int, *, batch: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, CHANNELS, dtype=torch.float64, generator=generator)


def reference(convolution: ShortConvolution, x: Tensor, state: Tensor | None = None) -> Tensor:
    """One document, written as the sum that the docstring gives."""
    W = convolution.kernel_width
    if state is None:
        state = x.new_zeros(x.shape[0], W - 1, x.shape[2])
    padded = torch.cat([state, x], 1)
    y = torch.zeros_like(x)
    for t in range(x.shape[1]):
        for j in range(W):
            y[:, t] += convolution.weight[:, W - 1 - j] * padded[:, t + W - 1 - j]
    if convolution.bias is not None:
        y = y + convolution.bias
    return F.silu(y)


def by_document(
    convolution: ShortConvolution, x: Tensor, bounds: list[int], states: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    outputs: list[Tensor] = []
    finals: list[Tensor] = []
    reach = convolution.kernel_width - 1
    for i, (start, stop) in enumerate(pairwise(bounds)):
        state = x.new_zeros(1, reach, CHANNELS) if states is None else states[i, None]
        piece = x[:, start:stop]
        outputs.append(reference(convolution, piece, state))
        finals.append(torch.cat([state, piece], 1)[:, stop - start :])
    return torch.cat(outputs, 1), torch.cat(finals)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("length", [0, 1, 2, 9])
def test_is_the_sum_of_its_definition(width: int, length: int) -> None:
    convolution, x = make(width), tokens(length, batch=2)
    y, state = convolution(x, output_state=True)
    torch.testing.assert_close(y, reference(convolution, x))
    assert state.shape == (2, width - 1, CHANNELS)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("cuts", [[4], [1, 2, 3], [0, 9], [1, 1]])
def test_pieces_with_state_are_one_pass(width: int, cuts: list[int]) -> None:
    convolution, x = make(width), tokens(9, batch=2)
    whole, last = convolution(x, output_state=True)
    state, parts = None, []
    for start, stop in zip([0, *cuts], [*cuts, 9], strict=True):
        y, state = convolution(x[:, start:stop], state=state, output_state=True)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, last)


DOCUMENTS = [[0, 12], [0, 1, 2, 3, 12], [0, 5, 5, 12], [0, 0, 7, 12, 12], [0, 4, 8, 12]]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bounds", DOCUMENTS)
@pytest.mark.parametrize("with_states", [False, True])
def test_documents_do_not_see_each_other(width: int, bounds: list[int], with_states: bool) -> None:
    convolution, x = make(width), tokens(12)
    states = None
    if with_states:
        states = torch.randn(len(bounds) - 1, width - 1, CHANNELS, dtype=torch.float64)
    expected, finals = by_document(convolution, x, bounds, states)
    y, found = convolution(x, cu_seqlens=torch.tensor(bounds), state=states, output_state=True)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(found, finals)


SHARDS = [(3, 3, 3, 3), (1, 1, 1, 9), (0, 5, 0, 7), (6, 1, 1, 4), (12, 0, 0, 0)]


@pytest.mark.parametrize("width", (1, 4))
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("bounds", [None, *DOCUMENTS])
@pytest.mark.parametrize("with_states", [False, True])
def test_ranks_are_one_device(
    width: int, shards: tuple[int, ...], bounds: list[int] | None, with_states: bool
) -> None:
    """Outputs, leaving states and gradients, also where the reach spans several short ranks."""
    convolution = make(width)
    x = tokens(12).requires_grad_()
    d_y = tokens(12, seed=1)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    num_states = 1 if bounds is None else len(bounds) - 1
    states = torch.randn(num_states, width - 1, CHANNELS, dtype=torch.float64)
    state = states.requires_grad_() if with_states else None
    whole, last = convolution(x, cu_seqlens=cu_seqlens, state=state, output_state=True)
    inputs = [x, convolution.weight, convolution.bias]
    expected = torch.autograd.grad(whole, inputs, d_y)
    starts = [sum(shards[:rank]) for rank in range(len(shards) + 1)]

    def run(group: object) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        sp = SequenceParallel(group, shard_sizes=shards)
        start, stop = starts[sp.rank], starts[sp.rank + 1]
        mine = x.detach()[:, start:stop].clone().requires_grad_()
        given = None if state is None else state.detach()
        y, leaving = convolution(mine, sp=sp, cu_seqlens=cu_seqlens, state=given, output_state=True)
        gradients = torch.autograd.grad(
            y, [mine, convolution.weight, convolution.bias], d_y[:, start:stop]
        )
        return y.detach(), leaving.detach(), gradients

    results = run_ranks(len(shards), run)
    torch.testing.assert_close(torch.cat([y for y, _, _ in results], 1), whole.detach())
    leaving = [s for _, s, _ in results]
    torch.testing.assert_close(leaving[-1] if bounds is None else sum(leaving), last.detach())
    d_x, d_weight, d_bias = zip(*(g for _, _, g in results), strict=True)
    torch.testing.assert_close(torch.cat(d_x, 1), expected[0])
    torch.testing.assert_close(sum(d_weight), expected[1])
    torch.testing.assert_close(sum(d_bias), expected[2])


def test_says_what_is_wrong() -> None:
    with pytest.raises(ArgumentError, match="kernel_width is 0"):
        ShortConvolution(4, 0)
    with pytest.raises(ArgumentError, match="did you mean 'silu'"):
        ShortConvolution(4, 3, activation="sillu")  # pyright: ignore
    with pytest.raises(ArgumentError, match="reach=2 in"):
        make(4)(tokens(3), state=torch.zeros(1, 2, CHANNELS))
    with pytest.raises(ArgumentError, match="x has 2 dims"):
        make(4)(tokens(3)[0])
