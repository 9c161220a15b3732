"""The linear attention layer: softmax attention's kernel replaced by a feature map."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from zeco.core.errors import ArgumentError, unknown_name
from zeco.layers.mixer import Call, HeadProjections, Mixer, head_dim
from zeco.operators.linear_attention import linear_attention


def _elu_plus_one(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def _identity(x: Tensor) -> Tensor:
    return x


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": _elu_plus_one,
    "relu": F.relu,
    "identity": _identity,
}
"""Feature maps of queries and keys by name; ``"elu"`` is elu(x) + 1."""


class LinearAttention(Mixer):
    """Linear attention without decay.

        o_t = φ(q_t)ᵀ Σ_{s≤t} φ(k_s) v_sᵀ / φ(q_t)ᵀ Σ_{s≤t} φ(k_s)        y_t = o_t W_o

    Args:
        width: D.
        num_heads: H.
        feature_map: φ, a name of `FEATURE_MAPS`.
        normalize: divide by the sum of weights, which needs the positive map ``"elu"``; else each
            head's output goes through an RMS norm.
        conv_width: kernel width of a short convolution on q, k and v; 0 for none.
        norm_eps: of the heads' norm, when there is one.

    Source: Katharopoulos et al., arXiv:2006.16236, equations 7 and 8; without ``normalize``, Qin
    et al., arXiv:2210.10340, section 4.2. Difference: the optional convolution.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        feature_map: str = "elu",
        normalize: bool = True,
        conv_width: int = 0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(width)
        if feature_map not in FEATURE_MAPS:
            raise ArgumentError(
                "LinearAttention: " + unknown_name("feature_map", feature_map, FEATURE_MAPS)
            )
        if normalize and feature_map != "elu":
            raise ArgumentError(
                f"LinearAttention: feature_map {feature_map!r} isn't positive, so sums of weights "
                "may be zero; use 'elu', or normalize=False"
            )
        K = head_dim("LinearAttention", "width", width, num_heads)
        self.normalize = normalize
        self.feature_map = feature_map
        self.heads = HeadProjections(width, ((num_heads, K),) * 3, conv_width=conv_width)
        self.norm = None if normalize else nn.RMSNorm(K, eps=norm_eps)
        self.out = nn.Linear(width, width, bias=False)

    def mix(self, x: Tensor, call: Call) -> Tensor:
        q, k, v = self.heads(x, call)
        feature_map = FEATURE_MAPS[self.feature_map]
        o, final = linear_attention(
            feature_map(q),
            feature_map(k),
            v,
            normalize=self.normalize,
            **call.operator_keywords,
        )
        call.keep(final)
        return self.out((o if self.norm is None else self.norm(o)).flatten(2))
