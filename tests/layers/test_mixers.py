"""Every mixer × the properties that all of them have; a new mixer is one line here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from zeco import SequenceParallel, gather_final_state, shard_batch
from zeco.core.errors import ArgumentError
from zeco.layers import (
    HGRN2,
    RWKV6,
    RWKV7,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    LightningAttention,
    LinearAttention,
    Mamba2,
    Mixer,
    MixerState,
    MultiScaleRetention,
    SoftmaxAttention,
)
from zeco.testing import run_ranks

WIDTH, HEADS, LENGTH = 16, 2, 11

MIXERS: dict[str, Callable[[], Mixer]] = {
    "attention": lambda: SoftmaxAttention(WIDTH, HEADS),
    "attention-grouped": lambda: SoftmaxAttention(
        WIDTH, 4, num_kv_heads=2, qk_norm=True, rotary_base=None
    ),
    "attention-window": lambda: SoftmaxAttention(WIDTH, HEADS, window=6, exchange="gather"),
    "gla": lambda: GatedLinearAttention(WIDTH, HEADS),
    "gla-convolution": lambda: GatedLinearAttention(WIDTH, HEADS, conv_width=4),
    "linear_attention": lambda: LinearAttention(WIDTH, HEADS, conv_width=3),
    "linear_attention-norm": lambda: LinearAttention(
        WIDTH, HEADS, normalize=False, feature_map="relu"
    ),
    "deltanet": lambda: DeltaNet(WIDTH, HEADS),
    "deltanet-negative": lambda: DeltaNet(WIDTH, HEADS, negative_eigenvalues=True, conv_width=0),
    "gated_deltanet": lambda: GatedDeltaNet(WIDTH, HEADS),
    "hgrn2": lambda: HGRN2(WIDTH, HEADS, lower_bound=0.5, conv_width=2),
    "kda": lambda: KimiDeltaAttention(WIDTH, HEADS),
    "lightning": lambda: LightningAttention(WIDTH, HEADS, depth=0.5),
    "mamba2": lambda: Mamba2(WIDTH, HEADS, state_dim=8),
    "mamba2-groups": lambda: Mamba2(WIDTH, 4, state_dim=4, num_groups=2, conv_width=0),
    "rwkv6": lambda: RWKV6(WIDTH, HEADS, blend_rank=4, decay_rank=4),
    "rwkv7": lambda: RWKV7(WIDTH, HEADS, rank=4),
    "retention": lambda: MultiScaleRetention(WIDTH, HEADS),
    "retention-convolution": lambda: MultiScaleRetention(WIDTH, HEADS, conv_width=4),
}

every_mixer = pytest.mark.parametrize("name", MIXERS)


def make(name: str) -> Mixer:
    torch.manual_seed(7)
    return MIXERS[name]().double()


def tokens(length: int = LENGTH, *, batch: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=generator)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def close_states(found: MixerState, expected: MixerState) -> None:
    close(found.recurrent, expected.recurrent)
    for one, other in zip(found.histories, expected.histories, strict=True):
        close(one, other)


@every_mixer
def test_token_by_token_is_one_pass(name: str) -> None:
    mixer, x = make(name), tokens(batch=2)
    whole, last = mixer(x, output_state=True)
    state, steps = None, []
    for t in range(LENGTH):
        y, state = mixer(
            x[:, t : t + 1], position_ids=torch.tensor([t]), state=state, output_state=True
        )
        steps.append(y)
    close(torch.cat(steps, 1), whole)
    close_states(state, last)


@every_mixer
def test_pieces_of_any_length_are_one_pass(name: str) -> None:
    mixer, x = make(name), tokens(batch=2)
    whole, last = mixer(x, output_state=True)
    state, parts = None, []
    for start, stop in ((0, 1), (1, 1), (1, 3), (3, LENGTH)):
        y, state = mixer(
            x[:, start:stop],
            position_ids=torch.arange(start, stop),
            state=state,
            output_state=True,
        )
        parts.append(y)
    close(torch.cat(parts, 1), whole)
    close_states(state, last)


@every_mixer
def test_is_causal(name: str) -> None:
    mixer, x = make(name), tokens()
    changed = x.clone()
    changed[:, 6:] += 1
    before, after = mixer(x)[0], mixer(changed)[0]
    close(after[:, :6], before[:, :6])
    assert (after[:, 6:] - before[:, 6:]).abs().amin(-1).min() > 0


@every_mixer
def test_documents_are_alone(name: str) -> None:
    mixer, x = make(name), tokens()
    bounds = [0, 1, 2, 7, 7, LENGTH]
    y, states = mixer(x, cu_seqlens=torch.tensor(bounds), output_state=True)
    for i, (start, stop) in enumerate(pairwise(bounds)):
        alone, state = mixer(
            x[:, start:stop], position_ids=torch.arange(start, stop), output_state=True
        )
        close(y[:, start:stop], alone)
        # Softmax attention pads the keys of shorter documents.
        fit = tuple(slice(size) for size in state.recurrent.shape)
        packed = MixerState(
            states.recurrent[i, None][fit], tuple(h[i, None] for h in states.histories)
        )
        close_states(packed, state)


@every_mixer
def test_documents_continue_from_their_states(name: str) -> None:
    mixer, x = make(name), tokens()
    bounds, split = torch.tensor([0, 4, LENGTH]), torch.tensor([0, 2, 5])
    positions = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)])
    whole, last = mixer(x, cu_seqlens=bounds, position_ids=positions, output_state=True)
    first = torch.tensor([0, 1, 4, 5, 6])
    second = torch.tensor([2, 3, 7, 8, 9, 10])
    _, state = mixer(
        x[:, first], cu_seqlens=split, position_ids=positions[first], output_state=True
    )
    y, state = mixer(
        x[:, second],
        cu_seqlens=torch.tensor([0, 2, 6]),
        position_ids=positions[second],
        state=state,
        output_state=True,
    )
    close(y, whole[:, second])
    close_states(state, last)


SHARDS = [(3, 3, 3, 2), (1, 1, 1, 8), (0, 6, 0, 5), (11, 0)]


@every_mixer
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("bounds", [None, [0, 5, 6, 11], [0, 3, 3, 11]])
def test_ranks_are_one_device(name: str, shards: tuple[int, ...], bounds: list[int] | None) -> None:
    """Outputs, the final state and every gradient."""
    mixer, x, d_y = make(name), tokens().requires_grad_(), tokens(seed=1)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    parameters = list(mixer.parameters())
    whole, last = mixer(x, cu_seqlens=cu_seqlens, output_state=True)
    d_x, *d_parameters = torch.autograd.grad(whole, [x, *parameters], d_y)
    starts = [sum(shards[:rank]) for rank in range(len(shards) + 1)]

    def run(group: object) -> tuple[Tensor, MixerState, tuple[Tensor, ...]]:
        sp = SequenceParallel(group, shard_sizes=shards)
        mine = slice(starts[sp.rank], starts[sp.rank + 1])
        local = x.detach()[:, mine].clone().requires_grad_()
        y, state = mixer(
            local,
            sp=sp,
            cu_seqlens=cu_seqlens,
            position_ids=torch.arange(LENGTH)[mine],
            output_state=True,
        )
        gradients = torch.autograd.grad(y, [local, *parameters], d_y[:, mine])
        with torch.no_grad():
            final = MixerState(
                gather_final_state(state.recurrent, sp, cu_seqlens=cu_seqlens),
                tuple(gather_final_state(h, sp, cu_seqlens=cu_seqlens) for h in state.histories),
            )
        return y.detach(), final, gradients

    results = run_ranks(len(shards), run)
    close(torch.cat([y for y, _, _ in results], 1), whole.detach())
    for _, final, _ in results:
        close_states(final, last)
    close(torch.cat([gradients[0] for _, _, gradients in results], 1), d_x)
    for i, expected in enumerate(d_parameters, start=1):
        close(sum(gradients[i] for _, _, gradients in results), expected)


@every_mixer
@pytest.mark.parametrize("bounds", [None, [0, 5, 6, 11]])
def test_zigzag_ranks_are_one_device(name: str, bounds: list[int] | None) -> None:
    mixer, x, d_y = make(name), tokens().requires_grad_(), tokens(seed=1)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    parameters = list(mixer.parameters())
    whole, _ = mixer(x, cu_seqlens=cu_seqlens)
    d_x, *d_parameters = torch.autograd.grad(whole, [x, *parameters], d_y)

    def run(group: object) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        sp = SequenceParallel(group, layout="zigzag")
        mine = shard_batch(
            {
                "inputs_embeds": x.detach(),
                "position_ids": torch.arange(LENGTH)[None],
                "d_y": d_y,
            },
            sp,
        )
        local = mine["inputs_embeds"].requires_grad_()
        y, _ = mixer(local, sp=sp, cu_seqlens=cu_seqlens, position_ids=mine["position_ids"])
        gradients = torch.autograd.grad(y, [local, *parameters], mine["d_y"])
        return mine["position_ids"][0], y.detach(), gradients

    results = run_ranks(3, run)
    for positions, y, gradients in results:
        close(y, whole.detach()[:, positions])
        close(gradients[0], d_x[:, positions])
    for i, expected in enumerate(d_parameters, start=1):
        close(sum(gradients[i] for _, _, gradients in results), expected)


@every_mixer
def test_ranks_continue_from_a_state(name: str) -> None:
    """A prompt in two calls, each over three ranks, then a token on one."""
    mixer, x = make(name), tokens(LENGTH + 1)
    with torch.no_grad():
        whole, _ = mixer(x)

    def run(group: object) -> Tensor:
        state, parts = None, []
        for first, shards in ((0, (1, 2, 1)), (4, (3, 0, 4))):
            sp = SequenceParallel(group, shard_sizes=shards)
            start = first + sum(shards[: sp.rank])
            mine = slice(start, start + shards[sp.rank])
            y, state = mixer(
                x[:, mine],
                sp=sp,
                position_ids=torch.arange(LENGTH)[mine],
                state=state,
                output_state=True,
            )
            state = MixerState(
                gather_final_state(state.recurrent, sp),
                tuple(gather_final_state(h, sp) for h in state.histories),
            )
            parts.append(y)
        y, _ = mixer(x[:, LENGTH:], position_ids=torch.tensor([LENGTH]), state=state)
        parts.append(y)
        return torch.cat(parts, 1)

    with torch.no_grad():
        results = run_ranks(3, run)
    order = [0, 4, 5, 6]  # rank 0's tokens of both calls
    close(results[0], whole[:, [*order, LENGTH]])
    close(results[2], whole[:, [3, 7, 8, 9, 10, LENGTH]])


@every_mixer
def test_half_precision_stays_near(name: str) -> None:
    mixer, x = make(name).float(), tokens().float()
    with torch.no_grad():
        expected, _ = mixer(x)
        found, state = mixer.bfloat16()(x.bfloat16(), output_state=True)
    assert found.dtype == torch.bfloat16
    kept = torch.bfloat16 if name.startswith("attention") else torch.float32
    assert state.recurrent.dtype == kept
    assert (found.float() - expected).norm() < 0.05 * expected.norm()


@every_mixer
def test_refuses_tokens_of_another_width(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"x has D={WIDTH + 1}"):
        make(name)(torch.zeros(1, 3, WIDTH + 1))
    with pytest.raises(ArgumentError, match="position_ids has T=4"):
        make(name)(tokens(3), position_ids=torch.arange(4))


def test_rotary_layers_ask_for_positions() -> None:
    mixer = make("retention")
    _, state = mixer(tokens(), output_state=True)
    with pytest.raises(ArgumentError, match="position_ids are missing"):
        mixer(tokens(1), state=state)
    with pytest.raises(ArgumentError, match="position_ids are missing"):
        mixer(tokens(), sp=SequenceParallel())


def test_refuses_the_state_of_another_layer() -> None:
    _, state = make("gla")(tokens(), output_state=True)
    with pytest.raises(ArgumentError, match="state has 0 histories"):
        make("gla-convolution")(tokens(), state=state)
    _, state = make("gla-convolution")(tokens(), output_state=True)
    with pytest.raises(ArgumentError, match="state has 1 histories, but this layer"):
        make("gla")(tokens(), state=state)


def test_constructors_name_what_does_not_divide() -> None:
    with pytest.raises(ArgumentError, match=r"width \* expand_k = 9 .* num_heads = 2"):
        GatedLinearAttention(18, 2)
    with pytest.raises(ArgumentError, match="must be even"):
        MultiScaleRetention(6, 2)
    with pytest.raises(ArgumentError, match="did you mean 'elu'"):
        LinearAttention(8, 2, feature_map="elu1")
    with pytest.raises(ArgumentError, match="isn't positive"):
        LinearAttention(8, 2, feature_map="relu")
