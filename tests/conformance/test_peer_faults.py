"""One test for each kind of fault that was reported against other sequence-parallel software."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

import zeco
from zeco.layers.convolution import ShortConvolution
from zeco.testing import run_ranks
from zeco.testing.cases import CASES, SETTINGS, Setting
from zeco.testing.conformance import Problem, relative_errors

BOUND = 1e-10
DENSE = ("delta_rule", "gated_delta_rule", "kda", "rwkv7")


def errors_of(case: str, ranks: int = 4, dtype=torch.float64, method="zeco", **changes):
    setting = dataclasses.replace(SETTINGS["plain"], **changes)
    problem = Problem(CASES[case], setting, dtype)
    return relative_errors(problem.sharded(ranks, method=method), problem.oracle())


def check(case: str, ranks: int = 4, **changes) -> None:
    errors = errors_of(case, ranks, **changes)
    assert max(errors.values()) <= BOUND, errors


# State


def test_state_corrected_and_not_only_the_neighbours_is_passed_on():
    check("gla", ranks=8, length=80, decay="none")


def test_state_gradients_cross_ranks_too():
    errors = errors_of("gla", ranks=5)
    assert {"d_q", "d_k", "d_v", "d_g", "d_initial_state"} <= errors.keys()
    assert max(errors.values()) <= BOUND


@pytest.mark.parametrize("case", ["simple_gla", "gla", "lightning_attention"])
def test_state_decays_by_each_heads_own_gate(case):
    check(case, heads=3, key_heads=3)


@pytest.mark.parametrize("case", DENSE)
def test_state_transitions_are_chained_in_fp32_for_bf16_inputs(case):
    setting = dataclasses.replace(SETTINGS["plain"], length=200)
    problem = Problem(CASES[case], setting, torch.bfloat16)
    one = relative_errors(problem.one_rank(), problem.oracle())["final_state"]
    many = relative_errors(problem.sharded(8, method="zeco"), problem.oracle())["final_state"]
    assert many <= 2 * one + 1e-6


@pytest.mark.parametrize("case", ["gla", "kda"])
def test_state_gradients_of_initial_and_final_states_reach_gates(case):
    with_states, without = (errors_of(case, states=s) for s in (True, False))
    assert max(with_states.values()) <= BOUND
    assert max(without.values()) <= BOUND


@pytest.mark.parametrize("case", ["gla", "gated_delta_rule"])
def test_state_and_a_second_call_equal_one_call(case):
    x = CASES[case].inputs(Setting(length=100), torch.float64)
    op = CASES[case].operator
    whole, state = op(**x, output_final_state=True)
    first, between = op(**{n: t[:, :37] for n, t in x.items()}, output_final_state=True)
    second, last = op(
        **{n: t[:, 37:] for n, t in x.items()}, initial_state=between, output_final_state=True
    )
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(last, state, rtol=1e-11, atol=1e-11)


def test_state_of_the_convolution_survives_a_split():
    convolution = ShortConvolution(4, 4).double()
    x = torch.randn(1, 20, 4, dtype=torch.float64)
    whole, _ = convolution(x)
    first, state = convolution(x[:, :7], output_state=True)
    second, _ = convolution(x[:, 7:], state=state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)


# Documents


def test_documents_boundaries_are_global_and_not_divided_by_the_ranks():
    check("gla", cu_seqlens=(0, 33, 150))


def test_documents_reset_the_convolution_as_well_as_the_scan():
    torch.manual_seed(0)
    convolution = ShortConvolution(4, 4)
    x, cu = torch.randn(1, 24, 4), torch.tensor([0, 9, 10, 24])
    alone = torch.cat([convolution(x[:, a:b])[0] for a, b in ((0, 9), (9, 10), (10, 24))], 1)

    def on_rank(group):
        sp = zeco.SequenceParallel(group)
        start, stop = sp.bounds(24)
        return convolution(x[:, start:stop], sp=sp, cu_seqlens=cu)[0].detach()

    torch.testing.assert_close(torch.cat(run_ranks(4, on_rank), 1), alone.detach())


def test_documents_that_start_exactly_at_a_ranks_start_inherit_nothing():
    check("gla", ranks=3, cu_seqlens=(0, 50, 100, 150))


def test_documents_inside_one_ranks_shard():
    check("gla", ranks=2, cu_seqlens=(0, 10, 20, 60, 150))


def test_documents_with_odd_boundaries_keep_every_token():
    check("delta_rule", ranks=4, cu_seqlens=(0, 1, 38, 77, 149, 150))


# Shapes


@pytest.mark.parametrize("length", [149, 151, 7])
def test_shapes_lengths_that_the_ranks_do_not_divide_lose_no_token(length):
    check("gla", ranks=4, length=length)


def test_shapes_ranks_shorter_than_the_convolutions_reach():
    convolution = ShortConvolution(4, 6)
    x = torch.randn(1, 9, 4)

    def on_rank(group):
        sp = zeco.SequenceParallel(group, shard_sizes=(3, 1, 0, 1, 4))
        start, stop = sp.bounds(9)
        return convolution(x[:, start:stop], sp=sp)[0].detach()

    whole = convolution(x)[0].detach()
    torch.testing.assert_close(torch.cat(run_ranks(5, on_rank), 1), whole)


def test_shapes_kernel_width_1():
    x = torch.randn(1, 5, 4)
    y, state = ShortConvolution(4, 1)(x, output_state=True)
    assert y.shape == x.shape
    assert state.shape == (1, 0, 4)


@pytest.mark.parametrize("case", ["gla", "kda"])
@pytest.mark.parametrize("dims", [(3, 5), (17, 9), (1, 1)])
def test_shapes_head_dims_that_are_no_powers_of_two_or_small(case, dims):
    check(case, key_dim=dims[0], value_dim=dims[1])


def test_shapes_inputs_that_are_not_contiguous():
    x = CASES["gla"].inputs(Setting(length=60), torch.float64)
    strided = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in x.items()}
    assert torch.equal(zeco.ops.gla(**strided)[0], zeco.ops.gla(**x)[0])


def test_shapes_a_batch_above_1_with_packing_is_refused():
    x = CASES["gla"].inputs(Setting(batch=2, length=8), torch.float32)
    with pytest.raises(zeco.ZecoError, match="cu_seqlens needs a batch of 1"):
        zeco.ops.gla(**x, cu_seqlens=torch.tensor([0, 8]))


def test_shapes_a_long_document_over_ranks_of_very_different_sizes():
    length, sizes = 65_536, (1, 30_000, 0, 77, 20_000, 10_458, 4_000, 1_000)
    setting = Setting(length=length, heads=1, key_heads=1, key_dim=8, value_dim=8)
    problem = Problem(CASES["gla"], dataclasses.replace(setting, weights=sizes), torch.float64)
    errors = relative_errors(problem.sharded(8, method="zeco"), problem.one_rank())
    assert max(errors.values()) <= BOUND, errors


# Numbers


@pytest.mark.parametrize("case", ["gla", "simple_gla", "kda", "rwkv7"])
def test_numbers_strong_decay_overflows_nothing(case):
    for dtype in (torch.float64, torch.float32):
        setting = dataclasses.replace(SETTINGS["strong decay"], decay="strong")
        found = Problem(CASES[case], setting, dtype).sharded(3, method="zeco")
        assert all(bool(x.isfinite().all()) for x in found.values())


def test_numbers_gate_gradients_are_summed_in_fp32():
    """In bf16, where a running sum of many tokens would stop growing."""
    setting = dataclasses.replace(SETTINGS["plain"], length=2000, heads=1, key_heads=1)
    problem = Problem(CASES["simple_gla"], setting, torch.bfloat16)
    assert relative_errors(problem.one_rank(), problem.oracle())["d_g"] < 2e-2


def test_numbers_autocast_leaves_gates_and_states_alone():
    x = CASES["gla"].inputs(Setting(length=100), torch.float32)
    plain, state = zeco.ops.gla(**x, output_final_state=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, cast_state = zeco.ops.gla(**x, output_final_state=True)
    assert torch.equal(plain, cast)
    assert torch.equal(state, cast_state)


# Loss


def loss_and_gradient(labels: torch.Tensor, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(1, labels.shape[1], 5, generator=torch.Generator().manual_seed(0))

    def on_rank(group):
        sp = zeco.SequenceParallel(group)
        part = zeco.shard_batch({"input_ids": labels, "labels": labels}, sp)
        start, stop = sp.bounds(labels.shape[1])
        mine = logits[:, start:stop].clone().requires_grad_()
        loss = zeco.cross_entropy(mine, part["shift_labels"], sp)
        loss.backward()
        return loss.detach(), mine.grad

    found = run_ranks(ranks, on_rank)
    assert len({float(loss) for loss, _ in found}) == 1, "every rank reports the same loss"
    return found[0][0], torch.cat([grad for _, grad in found], 1)


@pytest.mark.parametrize("masked", [slice(0, 0), slice(1, 4), slice(0, 6)])
def test_loss_is_the_mean_over_all_tokens_and_not_of_the_ranks_means(masked):
    """Nor is it, or its gradient, scaled by P; masked tokens and whole masked shards don't count."""
    labels = torch.arange(12)[None] % 5
    labels[:, masked] = -100
    one, many = loss_and_gradient(labels, 1), loss_and_gradient(labels, 4)
    torch.testing.assert_close(one, many)


def test_loss_labels_are_shifted_before_the_cut():
    labels = torch.arange(9)[None]
    parts = run_ranks(
        3,
        lambda g: zeco.shard_batch(
            {"input_ids": labels, "labels": labels}, zeco.SequenceParallel(g)
        )["shift_labels"],
    )
    assert torch.cat(parts, 1).tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, -100]]


def test_loss_of_a_fully_masked_batch_is_zero_and_not_nan():
    loss, gradient = loss_and_gradient(torch.full((1, 8), -100), 2)
    assert float(loss) == 0.0
    assert not bool(gradient.any())
    assert bool(F.cross_entropy(torch.zeros(1, 2), torch.tensor([-100])).isnan())  # torch's own
