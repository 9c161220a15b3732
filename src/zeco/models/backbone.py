"""What language models and encoders have in common: tokens to logits through blocks of mixers."""

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
from zeco.sequence_parallel import SequenceParallel

States = tuple[MixerState, ...]
"""One state a block: all that a model keeps of the tokens before."""


class Backbone(nn.Module):
    """Pre-norm blocks of a mixer and a gated MLP between an embedding and logits.

    Args:
        config: sizes and mixers.
        seed: of the initial parameters; None draws them from torch's global generator.
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

    def run(
        self,
        input_ids: Tensor,
        *,
        sp: SequenceParallel | None,
        position_ids: Tensor | None,
        cu_seqlens: Tensor | None,
        bidirectional: bool = False,
        states: Sequence[MixerState] | None = None,
        output_states: bool = False,
    ) -> tuple[Tensor, States]:
        """Return logits [B, T, vocab_size] and what `Mixer` calls leaving states, if wanted.

        Args:
            input_ids: [B, T].
            sp: see `Mixer`.
            position_ids: see `Mixer`.
            cu_seqlens: see `Mixer`.
            bidirectional: see `Mixer`.
            states: one a block, or None.
            output_states: whether the second value is wanted; else it is empty.
        """
        name = type(self).__name__
        check_shapes(name, {"input_ids": (input_ids, "B T")})
        if input_ids.is_floating_point():
            raise ArgumentError(
                f"{name}: input_ids has dtype {input_ids.dtype}, but must be an integer type"
            )
        if states is not None and len(states) != len(self.blocks):
            raise ArgumentError(
                f"{name}: got {len(states)} states for {len(self.blocks)} blocks; pass the "
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
                bidirectional=bidirectional,
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
        return F.linear(self.norm(x), weight), tuple(leaving)


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
