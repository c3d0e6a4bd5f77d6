"""What positions cost: a training step with each of them against our own without, and against x-transformers.

    python benchmarks/position_speed.py                         # about 8 minutes on two quiet cores
    python benchmarks/position_speed.py --only step --rounds 5

Every round runs each candidate once; what counts is the median over rounds of the ratio within a round. Memory is that
of a step for several lengths: a slope of its logarithm of 1 is linear.
"""

from collections.abc import Iterator
from typing import Any

import frame
import torch
from peers import Size
from steps import language_step
from torch import nn

import manyformer as mf

SIZE = Size(dim=256, depth=4, heads=4, vocab=256, max_length=8192)
BATCH, LENGTH = 1, 2048
LENGTHS = (1024, 2048, 4096, 8192)
NONE = "none"
GOALS: dict[str, dict[str, float]] = {
    "rope": {NONE: 1.10},
    "alibi": {NONE: 1.15},
    "t5": {NONE: 1.35},
    "shaw": {NONE: 1.5},
    "xl": {},
    "da": {},
}
"""How many times the step without positions each may take."""

PEERS: dict[str, dict[str, dict[str, Any]]] = {
    "rope": {
        "x-transformers": {"rotary_pos_emb": True},
        "x-transformers, attn_flash": {"rotary_pos_emb": True, "attn_flash": True},
    },
    "alibi": {"x-transformers, attn_flash": {"alibi_pos_bias": True, "attn_flash": True}},
    "t5": {"x-transformers": {"rel_pos_bias": True}},
}
"""The same positions in x-transformers: as it comes, and on torch's fused kernel where that is a choice."""

PEER_GOAL, MEMORY_GOALS = 0.7, {"memory": 1.15}


def training(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Time of a training step."""
    tokens = torch.randint(0, SIZE.vocab, (BATCH, LENGTH))
    for name, goals in GOALS.items():
        models = {name: ours(name), NONE: ours(NONE)}
        models |= {peer: theirs(words) for peer, words in PEERS.get(name, {}).items()}
        steps = {candidate: language_step(model, tokens) for candidate, model in models.items()}
        goals = {**dict.fromkeys(PEERS.get(name, {}), PEER_GOAL), **goals}
        yield from frame.contest(f"{name}, training step, batch {BATCH} x {LENGTH}", steps, rounds, goals)


def memory(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Extra memory of a training step against length."""
    for name in (NONE, *GOALS):
        model = ours(name)
        jobs = {n: language_step(model, torch.randint(0, SIZE.vocab, (1, n))) for n in LENGTHS}
        for job in jobs.values():
            job()
        yield from frame.growth(name, jobs, rounds, MEMORY_GOALS)


def ours(position: str) -> nn.Module:
    """`compose` with this position; what needs a length is told the longest."""
    return mf.build("compose", **SIZE._asdict(), position=position)


def theirs(words: dict[str, Any]) -> nn.Module:
    """x-transformers with a position."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=SIZE.dim, depth=SIZE.depth, heads=SIZE.heads, attn_dim_head=SIZE.dim // SIZE.heads, **words)
    return TransformerWrapper(
        num_tokens=SIZE.vocab, max_seq_len=SIZE.max_length, use_abs_pos_emb=False, attn_layers=layers
    )


if __name__ == "__main__":
    frame.run(__doc__, {"step": training, "memory": memory}, rounds=15, out="position_speed.json")
