"""The softmax attention layer of hybrids."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zeco.core.errors import ArgumentError
from zeco.core.shapes import check_shapes
from zeco.layers.mixer import Call, HeadProjections, Mixer, head_dim
from zeco.layers.rotary import rotate
from zeco.sequence_parallel.attention import PastKeys, attention, extend_past


class SoftmaxAttention(Mixer):
    """Grouped-query attention with rotary positions, causal but in encoders.

        q, k, v = W x       o_t = Σ_{j ≤ t} softmax_j(K^-½ · R_t q_t · R_j k_j) v_j       y = W_o o

    Its state is not of fixed size: all keys and values that the window reaches, which every rank
    then holds. `zeco.sequence_parallel.attention.attention` says how they are exchanged.

    Args:
        width: D.
        num_heads: of the queries.
        num_kv_heads: of keys and values, a divisor of num_heads; None for as many.
        rotary_base: see `zeco.layers.rotary.rotate`; None for no positions.
        qk_norm: whether queries and keys are divided by their root mean square, with weights that
            the heads share, before they are turned.
        norm_eps: of that norm.
        window: tokens that a token sees, itself included; None for all.
        exchange: ``"auto"``, ``"heads"`` or ``"gather"``.

    Source: Vaswani et al., arXiv:1706.03762; shared key heads: Ainslie et al., arXiv:2305.13245;
    rotary positions: Su et al., arXiv:2104.09864; norm of queries and keys: Henry et al.,
    arXiv:2010.04245 (an RMS norm here).
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        rotary_base: float | None = 10_000.0,
        qk_norm: bool = False,
        norm_eps: float = 1e-5,
        window: int | None = None,
        exchange: str = "auto",
    ) -> None:
        super().__init__(width)
        K = head_dim("SoftmaxAttention", "width", width, num_heads)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if kv_heads < 1 or num_heads % kv_heads:
            raise ArgumentError(
                f"SoftmaxAttention: num_kv_heads = {kv_heads} must be a divisor of num_heads = "
                f"{num_heads}"
            )
        if rotary_base is not None and K % 2:
            raise ArgumentError(
                f"SoftmaxAttention: width / num_heads = {K} must be even for rotary positions; use "
                f"a width that is a multiple of {2 * num_heads}, or rotary_base=None"
            )
        self.rotary_base = rotary_base
        self.window = window
        self.exchange = exchange
        self.heads = HeadProjections(width, ((num_heads, K), (kv_heads, K), (kv_heads, K)))
        self.q_norm = nn.RMSNorm(K, eps=norm_eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(K, eps=norm_eps) if qk_norm else None
        self.out = nn.Linear(num_heads * K, width, bias=False)

    def mix(self, x: Tensor, call: Call) -> Tensor:
        q, k, v = self.heads(x, call)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary_base is not None:
            both = rotate(torch.cat([q, k], 2), call.position_ids(x), base=self.rotary_base)
            q, k = both.split([q.shape[2], k.shape[2]], 2)
        past = _read(call, k, v)
        o = attention(
            q,
            k,
            v,
            causal=not call.bidirectional,
            window=self.window,
            cu_seqlens=call.cu_seqlens,
            past=past,
            sp=call.sp,
            exchange=self.exchange,
        )
        if call.output_state:
            found = extend_past(
                past, k, v, window=self.window, cu_seqlens=call.cu_seqlens, sp=call.sp
            )
            call.keep(torch.cat([found.k, found.v], -1).transpose(1, 2))
            call.keep_history(found.lengths)
        return self.out(o.flatten(2))


def _read(call: Call, k: Tensor, v: Tensor) -> PastKeys | None:
    lengths, kept = call.take_history(), call.recurrent
    if lengths is None or kept is None:
        return None
    check_shapes(
        "state of SoftmaxAttention",
        {"recurrent": (kept, "N H S C"), "history": (lengths, "N")},
        H=k.shape[2],
        C=k.shape[3] + v.shape[3],
    )
    kept = kept.transpose(1, 2)
    return PastKeys(kept[..., : k.shape[3]], kept[..., k.shape[3] :], lengths)
