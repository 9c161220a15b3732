"""Operators and settings for the conformance suite and `zeco verify`: one line an operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zeco import ops
from zeco.operators import delta_oracle, oracle

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """What a case is run on.

    Attributes:
        name: for tables.
        batch: B.
        length: L, over all ranks.
        heads: value heads H.
        key_heads: heads of q and k.
        key_dim: K.
        value_dim: V.
        decay: ``"mild"``, ``"strong"`` (-20 a token) or ``"none"`` (0).
        states: whether an initial state is given and the final state has a gradient.
        cu_seqlens: global boundaries of packed documents.
        weights: relative shard sizes, cycled over the ranks; None for the default split.
        layout: of the tokens over the ranks.
    """

    name: str = "plain"
    batch: int = 1
    length: int = 150
    heads: int = 2
    key_heads: int = 2
    key_dim: int = 12
    value_dim: int = 10
    decay: str = "mild"
    states: bool = True
    cu_seqlens: tuple[int, ...] | None = None
    weights: tuple[int, ...] | None = None
    layout: str = "contiguous"

    def shard_sizes(self, num_slots: int) -> tuple[int, ...] | None:
        """Return the tokens of every rank, or slot, in proportion to ``weights``."""
        if self.weights is None:
            return None
        weights = [self.weights[r % len(self.weights)] for r in range(num_slots)]
        if not any(weights):
            weights[0] = 1
        sizes = [self.length * w // sum(weights) for w in weights]
        sizes[weights.index(max(weights))] += self.length - sum(sizes)
        return tuple(sizes)


SETTINGS = {
    s.name: s
    for s in (
        Setting(),
        Setting("no states", states=False),
        Setting("batch of 3", batch=3),
        Setting("grouped heads", heads=4, key_heads=2),
        Setting("uneven, an empty rank", weights=(3, 0, 7, 1)),
        Setting("short", length=3),
        Setting("strong decay", decay="strong"),
        Setting("no decay", decay="none"),
        Setting("packed", cu_seqlens=(0, 1, 40, 40, 75, 76, 150)),
        Setting("zigzag", layout="zigzag"),
        Setting("zigzag, packed", cu_seqlens=(0, 1, 40, 40, 75, 76, 150), layout="zigzag"),
        Setting("zigzag, uneven", weights=(3, 0, 7, 1, 0), layout="zigzag", length=131),
        Setting("packed, uneven", cu_seqlens=(0, 5, 130, 131, 150), weights=(1, 4, 0, 2)),
    )
}


@dataclass(frozen=True)
class Case:
    """An operator with its oracle and random inputs.

    Attributes:
        name: the public operator.
        operator: called with the inputs by name.
        oracle: the fp64 token-by-token recurrence, called alike.
        make: makes the inputs beyond q, k and v.
        whole: inputs without a sequence dim, which every rank gets whole.
        options: passed on every call.
    """

    name: str
    operator: Callable[..., Any]
    oracle: Callable[..., Any]
    make: Callable[[Setting, torch.Generator], Inputs]
    whole: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def inputs(self, setting: Setting, dtype: torch.dtype, seed: int = 0) -> Inputs:
        """Make the global inputs, [B, L, ...] where they have a sequence dim."""
        g = torch.Generator().manual_seed(seed)
        return {name: x.to(dtype) for name, x in self.make(setting, g).items()}

    def state_shape(self, setting: Setting) -> tuple[int, int, int, int]:
        """Return the shape of initial and final states."""
        documents = setting.batch if setting.cu_seqlens is None else len(setting.cu_seqlens) - 1
        extra = 1 if dict(self.options).get("normalize") else 0
        return documents, setting.heads, setting.key_dim, setting.value_dim + extra


def _normal(s: Setting, g: torch.Generator, heads: int, *dims: int) -> Tensor:
    return torch.randn(s.batch, s.length, heads, *dims, generator=g, dtype=torch.float64)


def _log_decay(s: Setting, g: torch.Generator, heads: int, *dims: int) -> Tensor:
    """Log decays of their own for every head, token and channel, <= 0."""
    if s.decay == "none":
        return torch.zeros(s.batch, s.length, heads, *dims, dtype=torch.float64)
    gates = F.logsigmoid(_normal(s, g, heads, *dims) + 2)
    return gates - 20 if s.decay == "strong" else gates


def _qkv(s: Setting, g: torch.Generator) -> Inputs:
    return {
        "q": _normal(s, g, s.key_heads, s.key_dim),
        "k": _normal(s, g, s.key_heads, s.key_dim),
        "v": _normal(s, g, s.heads, s.value_dim),
    }


def scalar_gate(s: Setting, g: torch.Generator) -> Inputs:
    """Make q, k, v and one log decay a head and token."""
    return {**_qkv(s, g), "g": _log_decay(s, g, s.heads)}


def _diagonal_gate(s: Setting, g: torch.Generator) -> Inputs:
    return {**_qkv(s, g), "g": _log_decay(s, g, s.heads, s.key_dim)}


def _fixed_decay(s: Setting, g: torch.Generator) -> Inputs:
    return {**_qkv(s, g), "log_decay": _log_decay(s, g, s.heads)[0, 0]}


def _hgrn2(s: Setting, g: torch.Generator) -> Inputs:
    inputs = _qkv(s, g)
    del inputs["k"]
    return {**inputs, "g": _log_decay(s, g, s.key_heads, s.key_dim)}


def _positive(s: Setting, g: torch.Generator) -> Inputs:
    inputs = _qkv(s, g)
    return {**inputs, "q": inputs["q"].abs() + 0.1, "k": inputs["k"].abs() + 0.1}


def _delta(s: Setting, g: torch.Generator) -> Inputs:
    """Unit keys and betas up to 2, where the delta rule reflects."""
    inputs = _qkv(s, g)
    betas = 2 * torch.rand(s.batch, s.length, s.heads, generator=g, dtype=torch.float64)
    return {**inputs, "k": F.normalize(inputs["k"], dim=-1), "beta": betas}


def _gated_delta(s: Setting, g: torch.Generator) -> Inputs:
    return {**_delta(s, g), "g": _log_decay(s, g, s.heads)}


def _kda(s: Setting, g: torch.Generator) -> Inputs:
    return {**_delta(s, g), "g": _log_decay(s, g, s.heads, s.key_dim)}


def _ssd(s: Setting, g: torch.Generator) -> Inputs:
    rates = torch.rand(s.heads, generator=g, dtype=torch.float64) + 0.1
    factor = {"mild": 1.0, "strong": 40.0, "none": 0.0}[s.decay]
    return {
        "x": _normal(s, g, s.heads, s.value_dim),
        "dt": F.softplus(_normal(s, g, s.heads)),
        "A": -factor * rates,
        "B": _normal(s, g, s.key_heads, s.key_dim),
        "C": _normal(s, g, s.key_heads, s.key_dim),
        "D": torch.randn(s.heads, generator=g, dtype=torch.float64),
    }


def _rwkv6(s: Setting, g: torch.Generator) -> Inputs:
    return {
        "r": _normal(s, g, s.heads, s.key_dim),
        "k": _normal(s, g, s.heads, s.key_dim),
        "v": _normal(s, g, s.heads, s.value_dim),
        "w": _log_decay(s, g, s.heads, s.key_dim),
        "u": torch.randn(s.heads, s.key_dim, generator=g, dtype=torch.float64),
    }


def _rwkv7(s: Setting, g: torch.Generator) -> Inputs:
    """Removal along a unit direction and writing back in part, as the layer makes them."""
    direction = F.normalize(_normal(s, g, s.heads, s.key_dim), dim=-1)
    rate = torch.sigmoid(_normal(s, g, s.heads, s.key_dim))
    return {
        "r": _normal(s, g, s.heads, s.key_dim),
        "w": _log_decay(s, g, s.heads, s.key_dim),
        "k": _normal(s, g, s.heads, s.key_dim),
        "v": _normal(s, g, s.heads, s.value_dim),
        "a": -direction,
        "b": direction * rate,
    }


CASES = {
    case.name: case
    for case in (
        Case("linear_attention", ops.linear_attention, oracle.linear_attention, _qkv),
        Case(
            "linear_attention, normalized",
            ops.linear_attention,
            oracle.linear_attention,
            _positive,
            options=(("normalize", True),),
        ),
        Case("retention", ops.retention, oracle.retention, _qkv),
        Case(
            "lightning_attention",
            ops.lightning_attention,
            oracle.lightning_attention,
            _fixed_decay,
            whole=("log_decay",),
        ),
        Case("simple_gla", ops.simple_gla, oracle.simple_gla, scalar_gate),
        Case("gla", ops.gla, oracle.gla, _diagonal_gate),
        Case(
            "hgrn2",
            lambda q, v, g, **kw: ops.hgrn2(q, None, v, g, **kw),
            lambda q, v, g, **kw: oracle.hgrn2(q, None, v, g, **kw),
            _hgrn2,
        ),
        Case("ssd", ops.ssd, oracle.ssd, _ssd, whole=("A", "D")),
        Case("rwkv6", ops.rwkv6, oracle.rwkv6, _rwkv6, whole=("u",)),
        Case("delta_rule", ops.delta_rule, delta_oracle.delta_rule, _delta),
        Case("gated_delta_rule", ops.gated_delta_rule, delta_oracle.gated_delta_rule, _gated_delta),
        Case("kda", ops.kda, delta_oracle.kda, _kda),
        Case("rwkv7", ops.rwkv7, delta_oracle.rwkv7, _rwkv7),
    )
}
