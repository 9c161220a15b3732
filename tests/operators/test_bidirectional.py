"""Both directions: the formulas written out, ranks against one device, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zeco import SequenceParallel, ops
from zeco.core.errors import ArgumentError
from zeco.testing import run_ranks
from zeco.testing.cases import CASES, SETTINGS, Setting

SETTING = Setting(length=90, heads=4, key_heads=2, key_dim=5, value_dim=3)
DOCUMENTS = (0, 1, 40, 40, 75, 76, 90)


def weights(g: Tensor) -> Tensor:
    """Return P [B, T, J, H, K]: the decays of (j, t] for an earlier j, of [t, j) for a later one."""
    sums = F.pad(g.cumsum(1), (0, 0, 0, 0, 1, 0))
    t = torch.arange(g.shape[1])
    before = sums[:, 1:, None] - sums[:, None, 1:]
    after = sums[:, None, :-1] - sums[:, :-1, None]
    later = (t > t[:, None])[None, :, :, None, None]
    return torch.where(later, after, before).clamp(max=0).exp()


def formula(q, k, v, g=None, *, documents=None) -> Tensor:
    """Attend to all tokens of the document, each weighed by the decays up to it, once."""
    H = v.shape[2]
    q, k = (x.repeat_interleave(H // x.shape[2], 2) for x in (q, k))
    g = torch.zeros_like(k) if g is None else g
    g = g[..., None].expand_as(k) if g.ndim == 3 else g
    bounds = (0, q.shape[1]) if documents is None else documents
    parts = [
        torch.einsum("bthk,bjhk,btjhk,bjhv->bthv", *(x[:, a:b] for x in (q, k)), P, v[:, a:b])
        for a, b in pairwise(bounds)
        for P in [weights(g[:, a:b])]
    ]
    return torch.cat(parts, 1) * q.shape[-1] ** -0.5


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("decay", ["mild", "strong", "none"])
@pytest.mark.parametrize("name", ["linear_attention", "simple_gla", "gla"])
def test_equals_the_formula(name, decay, documents):
    setting = Setting(**{**vars(SETTING), "decay": decay})
    x = {n: t.requires_grad_() for n, t in CASES[name].inputs(setting, torch.float64).items()}
    cu_seqlens = None if documents is None else torch.tensor(documents)
    o, state = CASES[name].operator(**x, bidirectional=True, cu_seqlens=cu_seqlens)
    expected = formula(**x, documents=documents)
    assert state is None
    close(o, expected)
    d_o = torch.randn_like(o)
    for found, wanted in zip(
        torch.autograd.grad(o, list(x.values()), d_o),
        torch.autograd.grad(expected, list(x.values()), d_o),
        strict=True,
    ):
        close(found, wanted)


def test_without_decay_it_is_full_attention():
    x = CASES["linear_attention, normalized"].inputs(SETTING, torch.float64)
    q, k = (x[n].repeat_interleave(2, 2) for n in "qk")
    scores = torch.einsum("bthk,bjhk->bhtj", q, k)
    expected = torch.einsum("bhtj,bjhv->bthv", scores / scores.sum(-1, keepdim=True), x["v"])
    close(ops.linear_attention(**x, normalize=True, bidirectional=True)[0], expected)


def test_fixed_decays_count_alike_from_both_sides():
    x = CASES["retention"].inputs(SETTING, torch.float64)
    q, k = (x[n].repeat_interleave(2, 2) for n in "qk")
    t = torch.arange(SETTING.length, dtype=torch.float64)
    # The default decays are those of the key heads.
    rates = (1 - 2.0 ** (-5 - torch.arange(2, dtype=torch.float64))).repeat_interleave(2)
    distance = (t - t[:, None]).abs()
    scores = torch.einsum("bthk,bjhk->bhtj", q, k) * rates[:, None, None] ** distance
    expected = torch.einsum("bhtj,bjhv->bthv", scores, x["v"]) * SETTING.key_dim**-0.5
    close(ops.retention(**x, bidirectional=True)[0], expected)


def test_rwkv6_counts_the_bonus_once():
    x = CASES["rwkv6"].inputs(SETTING, torch.float64)
    r, k, v, w, u = (x[n] for n in ("r", "k", "v", "w", "u"))
    sums = F.pad(w.cumsum(1), (0, 0, 0, 0, 1, 0))
    t = torch.arange(SETTING.length)
    before = sums[:, :-1, None] - sums[:, None, 1:]
    later, own = (t > t[:, None]), torch.eye(len(t), dtype=torch.bool)
    between = torch.where(later[..., None, None], before.transpose(1, 2), before)
    P = torch.where(own[..., None, None], u.expand_as(between), between.clamp(max=0).exp())
    expected = torch.einsum("bthk,bjhk,btjhk,bjhv->bthv", r, k, P, v) * SETTING.key_dim**-0.5
    close(ops.rwkv6(**x, bidirectional=True)[0], expected)


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta_rule", "kda", "rwkv7"])
def test_delta_rules_are_the_sum_of_two_passes(name):
    x = CASES[name].inputs(SETTING, torch.float64)
    forward, _ = CASES[name].oracle(**x)
    backward, _ = CASES[name].oracle(**{n: t.flip(1) for n, t in x.items()})
    close(CASES[name].operator(**x, bidirectional=True)[0], forward + backward.flip(1))


SPLITS = [
    ("plain", "zeco"),
    ("batch of 3", "lasp1"),
    ("packed", "lasp2"),
    ("packed", "ulysses"),
    ("uneven, an empty rank", "zeco"),
    ("packed, uneven", "zeco"),
    ("zigzag", "zeco"),
    ("zigzag, packed", "ulysses"),
    ("zigzag, packed", "lasp1"),
    ("zigzag, uneven", "zeco"),
]


@pytest.mark.parametrize("setting,method", SPLITS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_are_one_device(name, setting, method):
    case, setting = CASES[name], SETTINGS[setting]
    ranks = 2 if method == "ulysses" else 3
    x = {n: t.requires_grad_() for n, t in case.inputs(setting, torch.float64).items()}
    cu_seqlens = None if setting.cu_seqlens is None else torch.tensor(setting.cu_seqlens)
    options = {**dict(case.options), "bidirectional": True, "cu_seqlens": cu_seqlens}
    o, _ = case.operator(**x, **options)
    d_o = torch.randn_like(o)
    expected = dict(zip(x, torch.autograd.grad(o, list(x.values()), d_o), strict=True))

    def run(group):
        slots = SequenceParallel(group, layout=setting.layout).num_slots
        sp = SequenceParallel(
            group, method=method, layout=setting.layout, shard_sizes=setting.shard_sizes(slots)
        )
        tokens = torch.cat([torch.arange(*span) for span in sp.spans(setting.length)])
        mine = {
            n: (t if n in case.whole else t[:, tokens]).detach().clone().requires_grad_()
            for n, t in x.items()
        }
        found, _ = case.operator(**mine, **options, sp=sp)
        gradients = torch.autograd.grad(found, list(mine.values()), d_o[:, tokens])
        return tokens, found.detach(), dict(zip(mine, gradients, strict=True))

    results = run_ranks(ranks, run)
    order = torch.cat([tokens for tokens, _, _ in results]).argsort()
    close(torch.cat([found for _, found, _ in results], 1)[:, order], o.detach())
    for n, wanted in expected.items():
        parts = [gradients[n] for _, _, gradients in results]
        joined = sum(parts) if n in case.whole else torch.cat(parts, 1)[:, order]
        error = (joined - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-10, f"{n}: {error:.1e}"


def test_half_precision_keeps_its_dtype():
    x = CASES["gla"].inputs(SETTING, torch.bfloat16)
    o, _ = ops.gla(**x, bidirectional=True)
    assert o.dtype == torch.bfloat16
    expected = formula(**{n: t.double() for n, t in x.items()})
    assert (o.double() - expected).norm() < 0.01 * expected.norm()


def test_mirroring_twice_changes_nothing():
    def run(group):
        sp = SequenceParallel(group, shard_sizes=(1, 2, 4))
        mirror = sp.mirrored()
        again = mirror.mirrored()
        assert (mirror.rank, mirror.shard_sizes) == (2 - sp.rank, (4, 2, 1))
        assert (again.rank, again.shard_sizes) == (sp.rank, (1, 2, 4))
        assert mirror.ledger is sp.ledger
        assert mirror.spans(7) == tuple((7 - b, 7 - a) for a, b in sp.spans(7))

    run_ranks(3, run)


@pytest.mark.parametrize("name", CASES)
def test_refuses_states(name):
    case = CASES[name]
    x = case.inputs(SETTING, torch.float32)
    state = torch.zeros(case.state_shape(SETTING))
    with pytest.raises(ArgumentError, match="initial_state was given with bidirectional=True"):
        case.operator(**x, bidirectional=True, initial_state=state)
    with pytest.raises(ArgumentError, match="output_final_state=True was given with bidir"):
        case.operator(**x, bidirectional=True, output_final_state=True)
