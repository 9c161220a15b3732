"""A causal language model of linear-attention blocks, on one device or over many."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeco.collectives.recompute import checkpoint
from zeco.core.errors import ArgumentError
from zeco.core.shapes import check_shapes
from zeco.layers import Mixer, MixerState, ShortConvolution
from zeco.models.blocks import Block, swiglu_hidden
from zeco.models.config import ModelConfig
from zeco.models.registry import MIXERS, Place
from zeco.sequence_parallel import SequenceParallel, gather_final_state

States = tuple[MixerState, ...]
"""One state a block: all that a model keeps of the tokens before."""


class CausalLM(nn.Module):
    """Tokens to logits of the next token, through pre-norm blocks of a mixer and a gated MLP.

    Args:
        config: sizes and mixers.
        seed: of the initial parameters; None draws them from torch's global generator.

    >>> model = CausalLM(ModelConfig(width=16, num_layers=1, num_heads=2), seed=0)
    >>> model(torch.zeros(1, 5, dtype=torch.int64)).shape
    torch.Size([1, 5, 256])
    """

    def __init__(self, config: ModelConfig, *, seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        hidden = swiglu_hidden(config.width, config.mlp_ratio)
        self.blocks = nn.ModuleList(
            Block(_make_mixer(config, index), hidden, norm_eps=config.norm_eps)
            for index in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.width, config.vocab_size, bias=False)
        )
        self.initialize(None if seed is None else torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Draw all parameters anew, in a fixed order, so that equal seeds give equal models.

        Matrices and embeddings are normal with ``config.init_std``; the last matrix of every mixer
        and MLP is scaled down by ``sqrt(2 * num_layers)``, since so many of them add up in the
        residual stream (GPT-2's rule). Biases are 0, norms 1, the rest is each layer's own.

        Args:
            generator: on the parameters' device; None for torch's global one.
        """
        std = self.config.init_std
        residual_std = std * (2 * self.config.num_layers) ** -0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                last = name.endswith((".mixer.out", ".mlp.out"))
                module.weight.normal_(0, residual_std if last else std, generator=generator)
                for kind, parameter in module.named_parameters():
                    if kind == "bias":
                        parameter.zero_()
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0, std, generator=generator)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, Mixer | ShortConvolution):
                module.initialize(generator)

    def forward(
        self,
        input_ids: Tensor,
        *,
        sp: SequenceParallel | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        states: Sequence[MixerState] | None = None,
        output_states: bool = False,
    ) -> Tensor | tuple[Tensor, States]:
        """Return the logits of the token after each of this rank's.

        Args:
            input_ids: [B, T], integers below ``vocab_size``.
            sp: the sequence-parallel context when the sequence is split over ranks, else None.
            position_ids: positions [B, T] or [T] in the whole sequence; by default 0, 1, …, where
                the sequence is whole and starts here (only mixers with positions use them).
            cu_seqlens: global boundaries [N+1] of packed documents (B = 1), or None.
            states: what an earlier call's tokens have left; see `MixerState`.
            output_states: whether to return the second value too.

        Returns:
            Logits [B, T, vocab_size]; with ``output_states`` also the states that these leave.

        Raises:
            ArgumentError: a shape or dtype doesn't fit, or the states are another model's.
        """
        check_shapes("CausalLM", {"input_ids": (input_ids, "B T")})
        if input_ids.is_floating_point():
            raise ArgumentError(
                f"CausalLM: input_ids has dtype {input_ids.dtype}, but must be an integer type"
            )
        if states is not None and len(states) != len(self.blocks):
            raise ArgumentError(
                f"CausalLM: got {len(states)} states for {len(self.blocks)} blocks; pass the "
                "states that this model returned"
            )
        x = self.embedding(input_ids)
        leaving: list[MixerState] = []
        for index, block in enumerate(self.blocks):
            run = partial(
                block,
                sp=sp,
                cu_seqlens=cu_seqlens,
                position_ids=position_ids,
                state=None if states is None else states[index],
                output_state=output_states,
            )
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                x, state = checkpoint(run, x)
            else:
                x, state = run(x)
            if state is not None:
                leaving.append(state)
        weight = self.embedding.weight if self.head is None else self.head.weight
        logits = F.linear(self.norm(x), weight)
        return (logits, tuple(leaving)) if output_states else logits


def gather_states(
    states: States, sp: SequenceParallel, *, cu_seqlens: Tensor | None = None
) -> States:
    """Give every rank the states with which the sequence ends, to decode or to read on.

    Args:
        states: what a sharded call left on this rank.
        sp: the ranks that share the sequence.
        cu_seqlens: the global document boundaries of that call, or None.
    """
    return tuple(
        MixerState(
            gather_final_state(state.recurrent, sp, cu_seqlens=cu_seqlens),
            tuple(gather_final_state(h, sp, cu_seqlens=cu_seqlens) for h in state.histories),
        )
        for state in states
    )


def _make_mixer(config: ModelConfig, index: int) -> Mixer:
    place = Place(
        width=config.width,
        num_heads=config.num_heads,
        conv_width=config.conv_width,
        norm_eps=config.norm_eps,
        index=index,
        num_layers=config.num_layers,
    )
    return MIXERS[config.mixer(index)](place)


def count_parameters(model: nn.Module, *, embeddings: bool = True) -> int:
    """Return the number of parameters, each counted once.

    Args:
        model: the model.
        embeddings: whether to count embedding tables.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(p.numel() for p in model.parameters() if embeddings or id(p) not in tables)
