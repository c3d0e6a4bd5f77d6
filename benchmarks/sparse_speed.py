"""Sparse attention against dense and against released packages: training steps, slopes, and decoding with a window.

    python benchmarks/sparse_speed.py                      # everything, about 15 minutes on two quiet cores
    python benchmarks/sparse_speed.py --only window --rounds 3

Every round runs each candidate once; what counts is the median over rounds of the ratio within a round.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import frame
import torch
from floor import Adding, floor, planned
from steps import language_step, masked_step, rows_step
from torch import nn

import manyformer as mf
from manyformer.analysis.benchmarks import LargestTensorMode
from manyformer.inference.generate.next_token import bind_next_token, storage_bytes
from manyformer.models import ClassHead, LanguageModel, TokenEmbedding
from manyformer.models.embedding import positions_of
from manyformer.nn import Attention, Kernel, KernelCall, SoftmaxKernel
from manyformer.nn import masks as m
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import Mask
from manyformer.nn.positions import LearnedPosition, NoPosition
from manyformer.nn.softmax.sparse_plan import make_sparse_plan
from manyformer.recipes.bert import masked_encoder
from manyformer.recipes.parts.baselines import init_std, stack

DIM, DEPTH, HEADS, VOCAB, WINDOW = 256, 4, 4, 256, 256

WINDOW_GOALS = {
    2048: {"local-attention": 0.45, "dense": 1.0},
    4096: {"dense": 1.0},
    8192: {"local-attention": 0.30, "dense": 1.0},
}
MEMORY_GOALS = {"local-attention": 0.40}
ENCODER_GOALS = {"Longformer": 0.4, "BigBird": 0.5}
SLOPE_GOALS = {"operations": 1.05, "seconds": 1.25}
LARGEST_GOAL = 1.05
SLOPE_LENGTHS = (2048, 4096, 8192, 16384)
DECODED, STRETCH, FLAT = 4096, 512, 0.05
PACKED, PACKED_GOALS = 2048, {"whole rows": 1.25}

BLOCK, RANDOM = 64, 3
LINEAR: dict[str, Callable[[int], Mask]] = {
    "window": lambda _: m.Window(WINDOW),
    "dilated window": lambda _: m.Window(WINDOW // 4, dilation=4),
    "asymmetric window": lambda _: m.Window(200, lookahead=56),
    "two sides and global": lambda _: m.symmetric_window(128) | m.GlobalTokens(m.FirstTokens(16)),
    "four pieces": lambda _: m.four_piece_pattern(m.FirstTokens(64), l2l=m.symmetric_window(84)),
    "first tokens and window": lambda _: m.Causal() & (m.Window(WINDOW) | m.VisibleToAll(m.FirstTokens(4))),
    "block diagonal": lambda _: m.LocalBlocks(256),
    "local blocks": lambda _: m.Causal() & m.LocalBlocks(128, lookback=128),
    # rows above the first blocks do not exist: with many of them, pairs at 2k tokens would not yet be linear in length
    "image": lambda _: m.Local2D(64, 8, 16, 2, 16),
    # the first blocks have fewer before them to draw from: with many, pairs at 2k would not yet be linear in length
    "causal random blocks": lambda _: (
        m.Causal()
        & (
            m.Window(2 * BLOCK)
            | m.VisibleToAll(m.FirstTokens(BLOCK))
            | m.RandomBlocks(BLOCK, 2, 256, local_blocks=2, skip_first=1, past_only=True)
        )
    ),
    # drawn for texts of this length: of a longer list, short texts would have less
    "random blocks": lambda length: (
        m.LocalBlocks(BLOCK, lookback=BLOCK, lookahead=BLOCK)
        | m.GlobalTokens(m.FirstTokens(BLOCK))
        | m.RandomBlocks(BLOCK, RANDOM, length // BLOCK, skip_first=1)
    ),
    "dilated heads": lambda _: m.PerHead({0: m.Window(WINDOW, dilation=2)}, default=m.Window(WINDOW)),
}


def windows(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """A causal language model with window 256 against `local-attention` and our own dense one."""
    for length, goals in WINDOW_GOALS.items():
        models = {"ours": language_model(m.Window(WINDOW), length), "dense": language_model(m.Causal(), length)}
        models["local-attention"] = local_transformer(length)
        tokens = torch.randint(0, VOCAB, (1, length))
        steps = {name: language_step(model, tokens) for name, model in models.items()}
        yield from frame.contest(f"causal window {WINDOW}, {length} tokens", steps, rounds, goals, MEMORY_GOALS)


def encoders(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Encoders with global tokens and with random blocks against those of `transformers`."""
    for length in (2048, 8192):
        tokens = torch.randint(3, VOCAB, (1, length))
        targets = torch.where(torch.rand(1, length) < 0.15, tokens, IGNORE_INDEX)
        first = torch.zeros_like(tokens)
        first[:, 0] = 1
        sizes: dict[str, Any] = {"vocab": VOCAB, "dim": DIM, "depth": DEPTH, "heads": HEADS, "max_length": length}
        ours = mf.build("longformer", **sizes, window=WINDOW, global_tokens=1, dropout=0.0)
        peer_step = masked_step(longformer(length), tokens, targets, global_attention_mask=first)
        pairs = {"Longformer": (masked_step(ours, tokens, targets), peer_step)}
        blocks = masked_step(bigbird(length), tokens, targets)
        pairs["BigBird"] = (blocks, masked_step(their_bigbird(length), tokens, targets))
        for name, (candidate, peer) in pairs.items():
            steps = {"ours": candidate, name: peer}
            yield from frame.contest(f"{name}, {length} tokens", steps, rounds, ENCODER_GOALS)


def least(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """What BigBird's step costs without all that is no product of matrices in its attention."""
    for length in (2048, 8192):
        tokens = torch.randint(3, VOCAB, (1, length))
        targets = torch.where(torch.rand(1, length) < 0.15, tokens, IGNORE_INDEX)
        place, _ = positions_of(tokens, None, None)
        bare = masked_step(bigbird(length, lambda _: Adding()), tokens, targets)
        products = planned(make_sparse_plan(their_pattern(length), place, place, HEADS), DIM // HEADS)
        steps = {
            "no attention, bare products": floor(bare, products, DEPTH),
            "no attention": bare,
            "ours": masked_step(bigbird(length), tokens, targets),
            "BigBird": masked_step(their_bigbird(length), tokens, targets),
        }
        yield from frame.contest(f"the least BigBird can cost, {length} tokens", steps, rounds, ENCODER_GOALS)


def packed(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Rows of documents of any lengths, others in every step, against rows that are one document each.

    All of them have come before: plans are made once for every 128 tokens that a document may have.
    """
    tokens = torch.randint(0, VOCAB, (2, PACKED))
    every = [CausalLMBatch(tokens, tokens, documents(*tokens.shape)) for _ in range(30)]
    for name, keywords in (("longformer-lm", {"window": 128}), ("bigbird-lm", {"max_length": PACKED})):
        sizes: dict[str, Any] = {"vocab": VOCAB, "dim": DIM, "depth": DEPTH, "heads": HEADS, **keywords}
        steps = {
            "packed rows": rows_step(mf.build(name, **sizes), itertools.cycle(every)),
            "whole rows": language_step(mf.build(name, **sizes), tokens),
        }
        for _ in every:
            steps["packed rows"]()
        yield from frame.contest(f"{name}, two rows of {PACKED} tokens", steps, rounds, PACKED_GOALS)


def documents(rows: int, length: int) -> torch.Tensor:
    """Segments of documents whose lengths are spread evenly over powers of two, from 32 tokens to the whole row."""
    counts = (2 ** torch.empty(rows, length // 32).uniform_(5, math.log2(length))).long()
    ends = counts.cumsum(1)
    return torch.searchsorted(ends, torch.arange(length).expand(rows, -1).contiguous(), right=True)


def slopes(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """How work, time and the largest tensor grow with length, attention alone, forward and backward."""
    for name, mask in LINEAR.items():
        jobs = {length: attention_job(mask(length), length) for length in SLOPE_LENGTHS}
        yield from frame.growth(name, jobs, rounds, SLOPE_GOALS)
        largest: list[float] = []
        for job in jobs.values():
            with LargestTensorMode() as mode:
                job()
            largest.append(mode.elements)
        yield {
            "contest": "largest tensor, the slope of its size",
            "candidate": name,
            "values": dict(zip(SLOPE_LENGTHS, largest)),
            "slope": frame.log_slope(list(SLOPE_LENGTHS), largest),
            "goal": LARGEST_GOAL,
        }


def decoding(_: int) -> Iterator[frame.BenchmarkRow]:
    """Writing 4,096 tokens with a window of 256, as generation does it: the time and the state of each stretch."""
    model = language_model(m.Window(WINDOW), DECODED).eval()
    ends, seconds, sizes = [], [], []
    with torch.inference_mode():
        following, state, token = (
            bind_next_token(model),
            model.init_state(1, capacity=DECODED),
            torch.zeros(1, 1, dtype=torch.long),
        )
        for begin in range(0, DECODED, STRETCH):
            started = time.perf_counter()
            for _ in range(STRETCH):
                logits, state = following(token, state, None)
                token = logits.argmax(-1)
            ends.append(begin + STRETCH)
            seconds.append(time.perf_counter() - started)
            sizes.append(storage_bytes(state))
            yield {
                "contest": f"decoding with window {WINDOW}",
                "candidate": f"tokens {begin} to {begin + STRETCH}",
                "tokens_per_second": STRETCH / seconds[-1],
                "memory": sizes[-1],
            }
    for quantity, values, goal in (("seconds", seconds, FLAT), ("memory", sizes, 0.001)):
        slope = frame.log_slope(ends, values)
        yield {"contest": "growth with what is written", "candidate": quantity, "slope": slope, "goal": goal}


def language_model(mask: Mask, length: int) -> LanguageModel:
    """The parts of `transformer-lm` with another mask."""

    def layer(number: int) -> dict[str, Any]:
        return {"attention": Attention(DIM, HEADS, SoftmaxKernel(mask)), "ff": FeedForward(DIM, activation=nn.GELU())}

    std = init_std(DIM)
    embed = TokenEmbedding(VOCAB, DIM, position=LearnedPosition(DIM, length, std=std), std=std)
    body = stack(DEPTH, layer, order="pre", norm=partial(nn.LayerNorm, DIM), dropout=0.0)
    return LanguageModel(embed, body, ClassHead(DIM, VOCAB, tied=embed.token))


def bigbird(length: int, kernel: Callable[[Mask], Kernel] = SoftmaxKernel) -> nn.Module:
    """BERT with BigBird's pattern, or what else a kernel makes of it."""
    mask = their_pattern(length)

    def attention(number: int) -> Attention:
        return Attention(DIM, HEADS, kernel(mask))

    return masked_encoder(VOCAB, DIM, DEPTH, HEADS, None, 0.0, max_length=length, make_attention=attention)


def their_pattern(length: int) -> Mask:
    """Three blocks of 64 around, the first and the last, three random ones."""
    blocks = length // BLOCK
    ends = m.AtPositions(*range(BLOCK), *range(length - BLOCK, length))
    mask = m.LocalBlocks(BLOCK, lookback=BLOCK, lookahead=BLOCK) | m.GlobalTokens(ends)
    return mask | m.RandomBlocks(BLOCK, RANDOM, blocks, skip_first=1, skip_last=1)


def local_transformer(length: int) -> nn.Module:
    """`local_attention.LocalTransformer`."""
    from local_attention import LocalTransformer

    return LocalTransformer(  # type: ignore[no-any-return]
        num_tokens=VOCAB,
        dim=DIM,
        depth=DEPTH,
        heads=HEADS,
        dim_head=DIM // HEADS,
        max_seq_len=length,
        causal=True,
        local_attn_window_size=WINDOW,
    )


def longformer(length: int) -> nn.Module:
    """`transformers.LongformerForMaskedLM`."""
    from transformers import LongformerConfig, LongformerForMaskedLM

    config = LongformerConfig(
        attention_window=2 * WINDOW, max_position_embeddings=length + 2, type_vocab_size=1, **_theirs()
    )
    return LongformerForMaskedLM(config)


def their_bigbird(length: int) -> nn.Module:
    """`transformers.BigBirdForMaskedLM`."""
    from transformers import BigBirdConfig, BigBirdForMaskedLM

    config = BigBirdConfig(
        attention_type="block_sparse",
        block_size=BLOCK,
        num_random_blocks=RANDOM,
        max_position_embeddings=length,
        **_theirs(),
    )
    return BigBirdForMaskedLM(config)


def _theirs() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "intermediate_size": 4 * DIM,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def attention_job(mask: Mask, length: int) -> Callable[[], None]:
    """Attention alone, forward and backward."""
    kernel = SoftmaxKernel(mask)
    place, _ = positions_of(torch.zeros(1, length, dtype=torch.long), None, None)
    q, k, v = (torch.randn(1, HEADS, length, DIM // HEADS, requires_grad=True) for _ in range(3))
    up = torch.randn_like(q)

    def job() -> None:
        kernel(KernelCall(q, k, v, place, place, NoPosition())).y.backward(up)

    return job


if __name__ == "__main__":
    parts = {
        "window": windows,
        "encoders": encoders,
        "floor": least,
        "packed": packed,
        "slopes": slopes,
        "decode": decoding,
    }
    frame.run(__doc__, parts, rounds=7, out="sparse_speed.json")
