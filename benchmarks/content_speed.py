"""Attention that finds its keys against released packages: training steps, growth with length, memory with depth.

    python benchmarks/content_speed.py                     # everything, about 25 minutes on two quiet cores
    python benchmarks/content_speed.py --only step --rounds 3
    python benchmarks/content_speed.py --only growth       # no other package is needed
    python benchmarks/content_speed.py --only repetition   # nor here

Width 256, 4 heads, 4 layers, but where words are repeated. Every round runs each candidate once; what counts is the
median over rounds of the ratio within a round. Growth is the slope of logarithms from 2,048 tokens to 16,384.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import frame
import torch
from steps import language_step
from torch import nn

import manyformer as mf
from manyformer.nn.batches import CausalLMBatch

SIZE: dict[str, Any] = {"vocab": 256, "dim": 256, "depth": 4, "heads": 4}
BUCKETS, CHUNK = 32, 64
LENGTHS = (2048, 4096, 8192, 16384)
GROWTH_GOALS = {"operations": 1.25, "seconds": 1.4}
REPEATING: dict[str, Any] = {"vocab": 128, "dim": 128, "depth": 1, "heads": 2, "ff_dim": 128, "max_length": 1024}
REPEATED_CHUNKS, REPEATED_GOAL = {512: 64, 1024: 128}, 1.0
SHALLOW, DEEP, DEPTH_GOAL = 4, 16, 1.3
MEMBERS, BLOCK = 128, 128
LOCAL_HEADS, WINDOW = 2, 192  # as many tokens as a block of 128 and the one before show on average

Make = Callable[[int], nn.Module]
"""From the longest row to a model."""


class Contest(NamedTuple):
    """Candidates for one length, and by how much the first may be slower than which other."""

    title: str
    length: int
    makers: dict[str, Make]
    goals: dict[str, float]


def ours(recipe: str, **keywords: Any) -> Make:
    """A recipe of ours, long enough."""

    def make(length: int) -> nn.Module:
        parameters = mf.recipes()[recipe].signature.parameters
        return mf.build(
            recipe, **{**SIZE, **keywords, **({"max_length": length} if "max_length" in parameters else {})}
        )

    return make


def reformer(recipe: str, rounds: int, **keywords: Any) -> Make:
    """One of our Reformers, with buckets and chunks as in the contests."""
    return ours(recipe, num_buckets=BUCKETS, chunk_length=CHUNK, num_hashes=rounds, **keywords)


def reformer_pytorch(length: int) -> nn.Module:
    """`reformer_pytorch.ReformerLM`, causal: four rounds, chunks of 64, and so as many buckets as ours has."""
    from reformer_pytorch import ReformerLM

    return ReformerLM(
        num_tokens=SIZE["vocab"],
        dim=SIZE["dim"],
        depth=SIZE["depth"],
        heads=SIZE["heads"],
        max_seq_len=length,
        bucket_size=CHUNK,
        n_hashes=4,
        causal=True,
        axial_position_emb=False,
        ff_chunks=1,
    )


def hugging_face(length: int) -> nn.Module:
    """`transformers.ReformerModelWithLMHead`: local and hashing layers in turn, two rounds."""
    from transformers import ReformerConfig, ReformerModelWithLMHead

    config = ReformerConfig(
        vocab_size=SIZE["vocab"],
        hidden_size=SIZE["dim"],
        attention_head_size=SIZE["dim"] // SIZE["heads"],
        num_attention_heads=SIZE["heads"],
        attn_layers=["local", "lsh"] * (SIZE["depth"] // 2),
        feed_forward_size=4 * SIZE["dim"],
        num_hashes=2,
        num_buckets=BUCKETS,
        lsh_attn_chunk_length=CHUNK,
        local_attn_chunk_length=CHUNK,
        is_decoder=True,
        axial_pos_embds=False,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        lsh_attention_probs_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
        use_cache=False,
    )
    return ReformerModelWithLMHead(config)


def routing(recipe: str) -> Make:
    """One of our Routing Transformers: clusters of as many tokens, whatever the length."""

    def make(length: int) -> nn.Module:
        keywords = {
            "clusters": length // MEMBERS,
            "cluster_size": MEMBERS,
            "window": WINDOW,
            "local_heads": LOCAL_HEADS,
        }
        return ours(recipe, **keywords)(length)

    return make


class First(nn.Module):
    """The logits of a model that returns more."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens)[0]
        return logits


def released_routing(length: int) -> nn.Module:
    """`routing_transformer.RoutingTransformerLM`: two local heads, clusters of 128, which nobody moves here."""
    from routing_transformer import RoutingTransformerLM

    model = RoutingTransformerLM(
        num_tokens=SIZE["vocab"],
        dim=SIZE["dim"],
        depth=SIZE["depth"],
        heads=SIZE["heads"],
        dim_head=SIZE["dim"] // SIZE["heads"],
        max_seq_len=length,
        window_size=MEMBERS,
        n_local_attn_heads=LOCAL_HEADS,
        causal=True,
        _register_kmeans_update=False,
    )
    return First(model)


def released_sinkhorn(length: int) -> nn.Module:
    """`sinkhorn_transformer.SinkhornTransformerLM`, causal, with one earlier block of 128 beside each."""
    from sinkhorn_transformer import SinkhornTransformerLM

    return SinkhornTransformerLM(
        num_tokens=SIZE["vocab"],
        dim=SIZE["dim"],
        depth=SIZE["depth"],
        heads=SIZE["heads"],
        max_seq_len=length,
        bucket_size=BLOCK,
        causal=True,
        n_top_buckets=1,
    )


CONTESTS = [
    Contest(
        "Reformer, 4 rounds",
        2048,
        {
            "ours": reformer("reformer", 4),
            "reformer-pytorch": reformer_pytorch,
            "ours, strict": reformer("reformer-strict", 4),
            "our dense": ours("transformer-lm"),
        },
        {"reformer-pytorch": 0.5},
    ),
    Contest(
        "Reformer, local and hashing layers, 2 rounds",
        2048,
        {"ours": reformer("reformer", 2, lsh_every=2), "transformers": hugging_face},
        {"transformers": 0.8},
    ),
    Contest(
        "Routing, half of the heads local",
        2048,
        {
            "ours": routing("routing-transformer"),
            "routing-transformer": released_routing,
            "ours, strict": routing("routing-transformer-strict"),
            "our dense": ours("transformer-lm"),
        },
        {"routing-transformer": 0.9},
    ),
    Contest(
        "Sinkhorn, one sorted block",
        2048,
        {
            "ours": ours("sinkhorn-transformer", block=BLOCK),
            "sinkhorn-transformer": released_sinkhorn,
            "our dense": ours("transformer-lm"),
        },
        {"sinkhorn-transformer": 0.85},
    ),
]

GROWING: dict[str, Make] = {
    "reformer, 4 rounds": reformer("reformer", 4),
    "reformer-strict, 4 rounds": reformer("reformer-strict", 4),
    "routing-transformer": routing("routing-transformer"),
    "routing-transformer-strict": routing("routing-transformer-strict"),
    "sinkhorn-transformer": ours("sinkhorn-transformer", block=BLOCK),
}

REVERSIBLE = ("reformer", "reformer-strict")


def step(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Time and extra memory of a training step of one row."""
    for contest in CONTESTS:
        tokens = torch.randint(0, SIZE["vocab"], (1, contest.length))
        steps = {name: language_step(make(contest.length), tokens) for name, make in contest.makers.items()}
        yield from frame.contest(f"{contest.title}, {contest.length} tokens", steps, rounds, contest.goals)


def repetition(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """The models of `manyformer compare content/duplication` with one round of hashing against dense attention."""
    dense = mf.build("transformer-lm", **REPEATING)
    for length, chunk in REPEATED_CHUNKS.items():
        tokens = torch.randint(0, REPEATING["vocab"], (8, length))
        hashing = mf.build(
            "reformer",
            **REPEATING,
            num_hashes=1,
            chunk_length=chunk,
            num_buckets=8,
            position="learned",
            residual_streams="plain",
        )
        steps = {"ours, 1 round": language_step(hashing, tokens), "our dense": language_step(dense, tokens)}
        goals = {"our dense": REPEATED_GOAL}
        yield from frame.contest(f"repeated words, 8 rows of {length} tokens", steps, rounds, goals)


def growth(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """How operations and time of a training step grow with the length."""
    for name, make in GROWING.items():
        rows = {length: torch.randint(0, SIZE["vocab"], (1, length)) for length in LENGTHS}
        jobs = {length: language_step(make(length), row) for length, row in rows.items()}
        yield from frame.growth(name, jobs, max(3, rounds // 3), GROWTH_GOALS)


def depth(_: int) -> Iterator[frame.BenchmarkRow]:
    """Extra memory of loss and gradients at two depths, those of the weights among them."""
    batch = CausalLMBatch(*torch.randint(0, SIZE["vocab"], (2, 4, 2048)))
    for recipe in REVERSIBLE:
        for residual, goal in (("reversible", DEPTH_GOAL), ("plain", None)):
            memory = [
                frame.median_memory(
                    gradients(reformer(recipe, 2, depth=layers, residual_streams=residual)(2048), batch)
                )
                for layers in (SHALLOW, DEEP)
            ]
            yield {
                "contest": f"memory at depth {DEEP} against depth {SHALLOW}, 4 rows of 2048 tokens",
                "candidate": f"{recipe}, {residual}",
                "memory": memory[1],
                "memory_ratio": memory[1] / memory[0],
                "memory_goal": goal,
            }


def gradients(model: Any, batch: CausalLMBatch) -> frame.Step:
    """Loss and gradients alone."""

    def run() -> None:
        output = model.loss(batch)
        (output.total / output.targets).backward()
        model.zero_grad(set_to_none=True)

    run()
    return run


if __name__ == "__main__":
    parts = {"step": step, "repetition": repetition, "growth": growth, "depth": depth}
    frame.run(__doc__, parts, rounds=9, out="content_speed.json")
