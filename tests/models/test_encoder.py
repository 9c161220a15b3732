from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zeco import SequenceParallel, shard_batch
from zeco.core.errors import ArgumentError
from zeco.models import Encoder, ModelConfig, mask_tokens, masked_lm_loss
from zeco.models.registry import MIXERS
from zeco.testing import run_ranks

LENGTH, VOCABULARY = 14, 19


def make(layers: tuple[str, ...] = ("gla", "attention"), **changes: object) -> Encoder:
    config = ModelConfig(
        vocab_size=VOCABULARY,
        width=16,
        num_layers=len(layers),
        num_heads=2,
        layers=layers,
        init_std=0.2,
        **{"conv_width": 0, **changes},
    )
    return Encoder(config, seed=5).double()


def tokens(batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=generator)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_token_sees_every_other(mixer: str) -> None:
    encoder, ids = make((mixer,)), tokens()
    before = encoder(ids)
    for place in (0, LENGTH - 1):
        changed = ids.clone()
        changed[:, place] = (ids[:, place] + 1) % VOCABULARY
        assert (encoder(changed) - before).abs().amin(-1).min() > 0


@pytest.mark.parametrize("layers", [("gla", "attention"), ("rwkv6", "gated_deltanet"), ("mamba2",)])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("bounds", [None, [0, 5, 6, 14]])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_ranks_are_one_device(
    layers: tuple[str, ...], layout: str, bounds: list[int] | None, checkpointing: bool
) -> None:
    encoder = make(layers, activation_checkpointing=checkpointing, conv_width=3)
    generator = torch.Generator().manual_seed(2)
    ids, labels = mask_tokens(
        tokens(), mask_id=0, vocab_size=VOCABULARY, rate=0.5, generator=generator
    )
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    batch = {"input_ids": ids, "labels": labels, "cu_seqlens": cu_seqlens}
    parameters = list(encoder.parameters())
    whole = shard_batch(batch, SequenceParallel())
    logits = encoder(ids, cu_seqlens=cu_seqlens, position_ids=whole["position_ids"])
    loss = masked_lm_loss(logits, labels)
    expected = torch.autograd.grad(loss, parameters)

    def run(group: object) -> tuple[Tensor, tuple[Tensor, ...]]:
        sp = SequenceParallel(group, layout=layout)
        mine = shard_batch(batch, sp)
        found = encoder(
            mine["input_ids"], sp=sp, cu_seqlens=cu_seqlens, position_ids=mine["position_ids"]
        )
        mine_loss = masked_lm_loss(found, mine["labels"], sp)
        return mine_loss.detach(), torch.autograd.grad(mine_loss, parameters)

    results = run_ranks(3, run)
    for found, _ in results:
        close(found, loss.detach())
    for i, gradient in enumerate(expected):
        close(sum(gradients[i] for _, gradients in results), gradient)


def test_masks_as_documented() -> None:
    ids = torch.randint(1, 1000, (4, 5000), generator=torch.Generator().manual_seed(0))
    inputs, labels = mask_tokens(
        ids, mask_id=0, vocab_size=1000, generator=torch.Generator().manual_seed(1)
    )
    picked = labels != -100
    assert picked.double().mean().item() == pytest.approx(0.15, abs=0.01)
    assert torch.equal(labels[picked], ids[picked])
    assert torch.equal(inputs[~picked], ids[~picked])
    assert (inputs[picked] == 0).double().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (inputs == ids)[picked].double().mean().item() == pytest.approx(0.1, abs=0.03)


def test_learns_to_copy_from_the_right() -> None:
    """What follows a hidden token says what it was: only a reader from the end can know."""
    torch.manual_seed(0)
    encoder = make(("gla",)).float()
    optimizer = torch.optim.Adam(encoder.parameters(), 0.02)
    losses = []
    for _ in range(60):
        firsts = torch.randint(1, VOCABULARY, (16, 4))
        whole = firsts.repeat_interleave(2, 1)
        ids, labels = whole.clone(), torch.full_like(whole, -100)
        ids[:, ::2], labels[:, ::2] = 0, firsts
        loss = masked_lm_loss(encoder(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_says_what_is_wrong() -> None:
    with pytest.raises(ArgumentError, match="Encoder: input_ids has 1 dims"):
        make()(tokens()[0])
    with pytest.raises(ArgumentError, match=r"rate=1\.5"):
        mask_tokens(tokens(), mask_id=0, vocab_size=VOCABULARY, rate=1.5)
    with pytest.raises(ArgumentError, match="mask_id=19"):
        mask_tokens(tokens(), mask_id=19, vocab_size=VOCABULARY)
    mixer, x = make().blocks[0].mixer, torch.zeros(1, 3, 16, dtype=torch.float64)
    with pytest.raises(ArgumentError, match="output_state=True was given with bidirectional"):
        mixer(x, bidirectional=True, output_state=True)
