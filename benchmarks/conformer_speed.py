"""A training step of `conformer` layers against the Wav2Vec2-Conformer encoder of transformers, at 10 s of sound.

    python benchmarks/conformer_speed.py --threads 1

Both encoders have 4 layers of equal size with relative positions, batch norm and no dropout; they get the same vectors,
and a projection to 32 labels and the loss of CTC belong to both steps. 10 s are 500 vectors for wav2vec 2.0, one every
20 ms, and 250 for a conformer with two convolutions of stride 2. Attention of the other encoder is torch's fused
kernel (sdpa) or written out (eager).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import frame
import torch
from steps import train
from torch import Tensor, nn

from manyformer.nn.core import Chain, Context, contiguous_positions
from manyformer.nn.ops.ctc import ctc_losses
from manyformer.recipes.conformer import conformer_layer

DIM, DEPTH, HEADS, HIDDEN, KERNEL = 256, 4, 4, 1024, 31
ROWS, LABELS, TARGETS = 2, 32, 40


class ConformerEncoder(nn.Module):
    """Layers of `conformer` and a projection to labels."""

    def __init__(self) -> None:
        super().__init__()
        make_layer = conformer_layer(DIM, HEADS, HIDDEN, KERNEL)
        self.layers, self.head = Chain(**{str(number): make_layer() for number in range(DEPTH)}), nn.Linear(DIM, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(x, Context(contiguous_positions(len(x), 0, x.shape[1], x.device))).y)
        return logits


class ReleasedEncoder(nn.Module):
    """`Wav2Vec2ConformerEncoder` and a projection to labels."""

    def __init__(self, attention: str) -> None:
        from transformers import Wav2Vec2ConformerConfig
        from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import Wav2Vec2ConformerEncoder

        super().__init__()
        config: Any = Wav2Vec2ConformerConfig(
            hidden_size=DIM,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
            intermediate_size=HIDDEN,
            conv_depthwise_kernel_size=KERNEL,
            position_embeddings_type="relative",
            hidden_act="silu",
            attention_dropout=0.0,
            activation_dropout=0.0,
            hidden_dropout=0.0,
            conformer_conv_dropout=0.0,
            layerdrop=0.0,
            attn_implementation=attention,
        )
        self.encoder, self.head = Wav2Vec2ConformerEncoder(config), nn.Linear(DIM, LABELS)
        # it has convolutional positions too, which its `forward` does not use
        self.encoder.pos_conv_embed = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(x).last_hidden_state)
        return logits


def step_of(model: nn.Module, x: Tensor) -> frame.Step:
    """A training step on recordings of random vectors and random labels."""
    lengths, counts = torch.full((len(x),), x.shape[1]), torch.full((len(x),), TARGETS)
    targets = torch.randint(1, LABELS, (len(x), TARGETS))
    return train(model, lambda: ctc_losses(model(x), lengths, targets, counts).mean())


def steps_at(length: int, rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Steps of both with so many vectors for 10 s."""
    x = torch.randn(ROWS, length, DIM)
    released = {f"transformers, {name}": step_of(ReleasedEncoder(name), x) for name in ("sdpa", "eager")}
    steps = {"conformer": step_of(ConformerEncoder(), x), **released}
    return frame.contest(f"training step, {ROWS} x {length}", steps, rounds, dict.fromkeys(released, 1.0))


if __name__ == "__main__":
    parts = {f"frames-{length}": partial(steps_at, length) for length in (500, 250)}
    frame.run(__doc__ or "", parts, rounds=15, out="conformer_speed.json")
