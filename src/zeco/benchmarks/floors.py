"""What a call must move and multiply whatever its kernels: the floors under an operator's times."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

CHUNK = 64

# Products (rows, inner, columns) of a chunk, by letter: C tokens, K and V channels. Scores, their
# product with values, the chunk's update of the state, and the queries' read of the state.
DECAY_PRODUCTS = ("CKC", "CCV", "KCV", "CKV")
# And: keys' products with keys, the two solutions (as products with an inverse), keys' read.
DELTA_PRODUCTS = (*DECAY_PRODUCTS, "CKC", "CCV", "CCK", "CKV")
# And: two more kinds of scores, and the update and the output of what is written back.
DPLR_PRODUCTS = (*DELTA_PRODUCTS, "CKC", "CKC", "CCV", "KCV")

_PRODUCTS = dict.fromkeys(("delta_rule", "gated_delta_rule", "kda"), DELTA_PRODUCTS) | {
    "rwkv7": DPLR_PRODUCTS
}


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(x.numel() * x.element_size() for x in tensors)


def floors(
    op: str,
    inputs: Iterable[Tensor],
    o: Tensor,
    key_dim: int,
    *,
    copy_bytes_per_s: float,
    matmul_flops_per_s: float,
) -> dict[str, dict[str, float]]:
    """Return bytes, FLOPs and the least ms of a forward pass, and of one with its backward pass.

    Bytes: every input read and every output written once at the copy's bandwidth; backward the
    inputs and the outputs' gradient read and the inputs' gradients written. FLOPs: the products of
    the chunkwise form with chunks of 64 and, backward, two for each of them, at the rate of a
    large product. The larger of both times is the floor; recomputation counts as nothing.

    Args:
        op: the public operator.
        inputs: its tensors.
        o: its outputs [B, T, H, V].
        key_dim: K.
        copy_bytes_per_s: of the device.
        matmul_flops_per_s: of the device, in the call's dtype.
    """
    B, T, H, V = o.shape
    sizes = {"C": CHUNK, "K": key_dim, "V": V}
    products = _PRODUCTS.get(op, DECAY_PRODUCTS)
    a_chunk = sum(2 * sizes[a] * sizes[b] * sizes[c] for a, b, c in products)
    flops = a_chunk * B * H * T / CHUNK
    read, written = num_bytes(inputs), num_bytes([o])
    moved = {
        "forward": (read + written, flops),
        "forward_backward": (read + written + 2 * read + written, 3 * flops),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (count, products_flops) in moved.items():
        bytes_ms = count / copy_bytes_per_s * 1e3
        flops_ms = products_flops / matmul_flops_per_s * 1e3
        found[name] = {
            "bytes": count,
            "flops": products_flops,
            "bytes_ms": bytes_ms,
            "flops_ms": flops_ms,
            "floor_ms": max(bytes_ms, flops_ms),
        }
    return found
