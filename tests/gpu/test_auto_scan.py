"""A model trained over two GPUs with the scan that auto takes, against one GPU and the host's chain.

In fp64, for which operators have no kernels to compile: only the scan does.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector

from zeco import SequenceParallel, cross_entropy, shard_batch
from zeco.collectives.single import SingleTransport
from zeco.models import CausalLM, ModelConfig
from zeco.testing import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CONFIG = ModelConfig(vocab_size=61, width=256, num_layers=2, num_heads=2, layers=("gla",))
LENGTH, STEPS = 1000, 3


def train(sp):
    """Return the losses of some steps, and the first gradients as one vector."""
    model = CausalLM(CONFIG, seed=3).double().cuda()
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(CONFIG.vocab_size, (1, LENGTH), generator=generator).cuda()
    batch = shard_batch({"input_ids": text, "labels": text}, sp)
    losses, first = [], None
    for _ in range(STEPS):
        model.zero_grad()
        logits = model(batch["input_ids"], sp=sp, position_ids=batch["position_ids"])
        loss = cross_entropy(logits, batch["shift_labels"], sp)
        loss.backward()
        losses.append(float(loss))
        for parameter in model.parameters():
            parameter.grad.copy_(sp.transport.all_reduce(parameter.grad))
            with torch.no_grad():
                parameter -= 0.5 * parameter.grad
        if first is None:
            first = parameters_to_vector([p.grad for p in model.parameters()]).cpu()
    return losses, first


def train_all_ways():
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    auto, chain = SequenceParallel(group), SequenceParallel(group, algorithm="chain")
    shape = (1, CONFIG.num_heads, 64, 128)
    first_line = auto.explain(shape, dtype=torch.float64).splitlines()[0]
    found = {"auto": train(auto)}
    ring, messages = auto.transport._ring, auto.ledger.sent["forward"].messages
    found |= {"chain": train(chain), "one GPU": train(SequenceParallel(SingleTransport()))}
    # Rank 0 alone asks: nothing is exchanged.
    alone = auto.explain(shape, dtype=torch.float64).splitlines()[0] if rank == 0 else first_line
    return found, first_line, alone, ring is not None, messages


def test_a_model_trains_alike_with_auto_the_hosts_chain_and_one_gpu():
    results = run_processes(2, train_all_ways, timeout_s=90.0)
    for found, first_line, alone, has_ring, _ in results:
        assert first_line.startswith("chosen: device_chain")
        assert alone == first_line
        assert has_ring
        losses, gradients = found["one GPU"]
        assert losses[-1] < losses[0]
        for name in ("auto", "chain"):
            assert found[name][0] == pytest.approx(losses, rel=1e-10)
            error = (found[name][1] - gradients).norm() / gradients.norm()
            assert float(error) < 1e-10, name
    assert results[0][4] > 0
