"""The recurrence over chunks as dense maps, ``S ← T[c] S + U[c]``, back and forth, and its composition.

This is the form of the state pass, in which a chunk's map is needed for itself. It is outside of
autograd: gradients are those of `zeco.operators.delta.core`.
"""

from __future__ import annotations

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]


def scan_chunks(
    matrices: Tensor, updates: Tensor, starts: Tensor, ranges: Ranges
) -> tuple[Tensor, Tensor]:
    """Run the recurrence through every piece of a document, from a state of its own.

    Args:
        matrices: T [N, G, K, K], G the batch times the heads.
        updates: U [N, G, K, V].
        starts: the state [n, G, K, V] that enters each piece.
        ranges: for each piece, its first chunk and one past its last; together they are 0..N.

    Returns:
        The state that enters every chunk [N, G, K, V], and that after every piece [n, G, K, V].
    """
    states, finals = torch.empty_like(updates), torch.empty_like(starts)
    for i, (first, stop) in enumerate(ranges):
        (states[first] if first < stop else finals[i]).copy_(starts[i])
        for c in range(first, stop):
            target = states[c + 1] if c + 1 < stop else finals[i]
            torch.baddbmm(updates[c], matrices[c], states[c], out=target)
    return states, finals


def run_back(matrices: Tensor, d_states: Tensor, d_final: Tensor) -> Tensor:
    """Return the gradient [G, K, V] of the state that enters the first of the chunks given.

    Args:
        matrices: T [N, G, K, K].
        d_states: gradient [N, G, K, V] that each chunk's outputs send to the state entering it.
        d_final: gradient [G, K, V] of the state after the last.
    """
    for matrix, d_state in reversed(list(zip(matrices.mT, d_states, strict=True))):
        d_final = torch.baddbmm(d_state, matrix, d_final)
    return d_final


def fold_matrices(matrices: Tensor) -> Tensor:
    """Return the product ``T[N-1] ... T[1] T[0]`` [G, K, K]; the identity for N = 0."""
    if not len(matrices):
        _, G, K, _ = matrices.shape
        return torch.eye(K, dtype=matrices.dtype, device=matrices.device).repeat(G, 1, 1)
    while len(matrices) > 1:
        paired = len(matrices) // 2 * 2
        product = matrices[1:paired:2] @ matrices[0:paired:2]
        matrices = torch.cat([product, matrices[paired:]]) if paired < len(matrices) else product
    return matrices[0]


def fold_maps(matrices: Tensor, updates: Tensor) -> tuple[Tensor, Tensor]:
    """Compose all chunks' maps, in log2 N batched products: total [G, K, K] and update [G, K, V]."""
    if not len(matrices):
        return fold_matrices(matrices), updates.new_zeros(updates.shape[1:])
    while len(matrices) > 1:
        paired = len(matrices) // 2 * 2
        later = matrices[1:paired:2]
        update = updates[1:paired:2] + later @ updates[0:paired:2]
        product = later @ matrices[0:paired:2]
        if paired < len(matrices):
            product = torch.cat([product, matrices[paired:]])
            update = torch.cat([update, updates[paired:]])
        matrices, updates = product, update
    return matrices[0], updates[0]
