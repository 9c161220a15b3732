from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from zeco import SequenceParallel, cross_entropy, shard_batch
from zeco.core.errors import ArgumentError
from zeco.models import CausalLM, ModelConfig, count_parameters, gather_states
from zeco.testing import run_ranks

CONFIG = ModelConfig(
    vocab_size=19,
    width=16,
    num_layers=3,
    num_heads=2,
    layers=("gla", "retention", "linear_attention"),
    init_std=0.2,
)
LENGTH = 13


def make(**changes: object) -> CausalLM:
    return CausalLM(dataclasses.replace(CONFIG, **changes), seed=5).double()


def tokens(length: int = LENGTH, *, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(CONFIG.vocab_size, (batch, length), generator=generator)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_equal_seeds_give_equal_models() -> None:
    one, other, third = CausalLM(CONFIG, seed=3), CausalLM(CONFIG, seed=3), CausalLM(CONFIG, seed=4)
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(one.embedding.weight, third.embedding.weight)
    torch.manual_seed(3)
    fourth = CausalLM(CONFIG)
    torch.manual_seed(3)
    assert torch.equal(fourth.embedding.weight, CausalLM(CONFIG).embedding.weight)


def test_initial_scale_is_as_documented() -> None:
    config = dataclasses.replace(CONFIG, width=128, init_std=0.02)
    model = CausalLM(config, seed=0)
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)
    for block in model.blocks:
        residual = 0.02 / math.sqrt(2 * config.num_layers)
        assert block.mixer.out.weight.std().item() == pytest.approx(residual, rel=0.1)
        assert block.mlp.out.weight.std().item() == pytest.approx(residual, rel=0.1)
        assert block.mlp.gate_up.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_counts_parameters_once(tied: bool) -> None:
    model = make(tie_embeddings=tied)
    table = CONFIG.vocab_size * CONFIG.width
    assert count_parameters(model) - count_parameters(model, embeddings=False) == table
    assert count_parameters(make(tie_embeddings=True)) == count_parameters(make()) - table
    assert model(tokens()).shape == (2, LENGTH, CONFIG.vocab_size)


def test_pieces_are_one_pass() -> None:
    model, ids = make(), tokens()
    whole, last = model(ids, output_states=True)
    states, parts = None, []
    for start, stop in ((0, 1), (1, 2), (2, 9), (9, LENGTH)):
        logits, states = model(
            ids[:, start:stop],
            position_ids=torch.arange(start, stop),
            states=states,
            output_states=True,
        )
        parts.append(logits)
    close(torch.cat(parts, 1), whole)
    for found, expected in zip(states, last, strict=True):
        close(found.recurrent, expected.recurrent)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shards", [(4, 4, 3, 2), (0, 12, 1)])
@pytest.mark.parametrize("layers", [CONFIG.layers, ("mamba2", "rwkv7", "kda")])
def test_ranks_are_one_device(
    checkpointing: bool, shards: tuple[int, ...], layers: tuple[str, ...]
) -> None:
    """Loss, every gradient, and one state a layer and direction on the wire, checkpointed or not."""
    model = make(layers=layers, activation_checkpointing=checkpointing)
    plain = make(layers=layers)
    batch = {"input_ids": tokens(), "labels": tokens()}
    single = SequenceParallel()
    whole = shard_batch(batch, single)
    loss = cross_entropy(plain(whole["input_ids"]), whole["shift_labels"], single)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(loss, list(plain.parameters()))

    def run(group: object) -> tuple[Tensor, tuple[Tensor, ...], dict[str, int]]:
        sp = SequenceParallel(group, shard_sizes=shards, algorithm="chain", num_blocks=1)
        mine = shard_batch(batch, sp)
        logits = model(mine["input_ids"], sp=sp, position_ids=mine["position_ids"])
        mine_loss = cross_entropy(logits, mine["shift_labels"], sp)
        gradients = torch.autograd.grad(mine_loss, parameters)
        return (
            mine_loss.detach(),
            gradients,
            {purpose: traffic.messages for purpose, traffic in sp.ledger.sent.items()},
        )

    results = run_ranks(len(shards), run)
    for found, _, _ in results:
        close(found, loss.detach())
    for i, gradient in enumerate(expected):
        close(sum(gradients[i] for _, gradients, _ in results), gradient)
    for rank, (_, _, sent) in enumerate(results):
        assert sent.get("forward", 0) == (CONFIG.num_layers if rank + 1 < len(shards) else 0)
        assert sent.get("backward", 0) == (CONFIG.num_layers if rank else 0)
        assert sent["halo"] == CONFIG.num_layers * (1 if rank in (0, len(shards) - 1) else 2)


def test_prompt_over_ranks_then_decoding_on_one() -> None:
    model, ids = make(), tokens()

    def run(group: object) -> Tensor:
        sp = SequenceParallel(group)
        mine = shard_batch({"input_ids": ids[:, :-1]}, sp)
        _, states = model(
            mine["input_ids"], sp=sp, position_ids=mine["position_ids"], output_states=True
        )
        states = gather_states(states, sp)
        return model(ids[:, -1:], position_ids=torch.tensor([LENGTH - 1]), states=states)

    with torch.no_grad():
        expected = model(ids)[:, -1:]
        for logits in run_ranks(3, run):
            close(logits, expected)


def test_packed_documents_are_alone() -> None:
    model, ids = make(), tokens(batch=1)
    packed = model(ids, cu_seqlens=torch.tensor([0, 6, LENGTH]))
    close(packed[:, :6], model(ids[:, :6]))
    close(packed[:, 6:], model(ids[:, 6:]))


def test_says_what_is_wrong() -> None:
    model = make()
    with pytest.raises(ArgumentError, match="input_ids has 1 dims"):
        model(tokens()[0])
    with pytest.raises(ArgumentError, match="must be an integer type"):
        model(tokens().float())
    with pytest.raises(ArgumentError, match="got 0 states for 3 blocks"):
        model(tokens(), states=())
