"""Sparse attention against dense and against released packages: training steps, slopes, and decoding with a window.

    python benchmarks/sparse_speed.py                      # everything, about 15 minutes on two quiet cores
    python benchmarks/sparse_speed.py --only window --rounds 3

Every round runs each candidate once; what counts is the median over rounds of the ratio within a round.
"""

import argparse
import json
import math
import os
import statistics
import time

os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyformer as mf
from manyformer import core
from manyformer import masks as m
from manyformer.attention import Attention
from manyformer.batches import IGNORE, MaskedBatch, TextBatch
from manyformer.bench import Largest, crowd, extra_memory, paired, take_turns
from manyformer.feedforward import FeedForward
from manyformer.flops import count_flops
from manyformer.kernels import Softmax
from manyformer.masks import Mask
from manyformer.models import Embedding, Head, LanguageModel, Model
from manyformer.models.places import locate
from manyformer.position import Learned, NoPosition
from manyformer.recipes.bert import masked_encoder
from manyformer.recipes.stacks import small_std, stack

DIM, DEPTH, HEADS, VOCAB, WINDOW = 256, 4, 4, 256, 256
CPU = torch.device("cpu")

WINDOW_GOALS = {"local-attention": {2048: 0.45, 8192: 0.30}, "dense": {2048: 1.0, 4096: 1.0, 8192: 1.0}}
MEMORY_GOAL = 0.40
ENCODER_GOALS = {"Longformer": 0.4, "BigBird": 0.5}
FLOP_SLOPE, CLOCK_SLOPE = 1.05, 1.25
SLOPE_LENGTHS = (2048, 4096, 8192, 16384)
DECODED, STRETCH = 4096, 512

BLOCK, RANDOM = 64, 3
LINEAR: dict[str, Mask] = {
    "window": m.Window(WINDOW),
    "dilated window": m.Window(WINDOW // 4, dilation=4),
    "two sides and global": m.around(128) | m.Global(m.First(16)),
    "block diagonal": m.Blocks(256),
    "local blocks": m.Causal() & m.Blocks(128, before=128),
    # rows above the first blocks do not exist: with many of them, pairs at 2k tokens would not yet be linear in length
    "image": m.Local2D(64, 8, 16, 2, 16),
    "causal random blocks": m.Causal()
    & (m.Window(3 * BLOCK) | m.To(m.First(BLOCK)) | m.RandomBlocks(BLOCK, RANDOM, 256, past=True)),
    "dilated heads": m.Heads({0: m.Window(WINDOW, dilation=2)}, rest=m.Window(WINDOW)),
}


def main() -> None:
    """Measure, print, write JSON."""
    words = _arguments()
    torch.set_num_threads(words.threads)
    torch.manual_seed(0)
    if warning := crowd():
        print(f"warning: {warning}")
    jobs: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "window": partial(windows, words.rounds),
        "encoders": partial(encoders, words.rounds),
        "slopes": slopes,
        "decode": decoding,
    }
    rows = [row for name, job in jobs.items() if words.only in (None, name) for row in shown(job())]
    found = {"threads": words.threads, "rounds": words.rounds, "torch": torch.__version__, "warning": warning}
    Path(words.out).write_text(json.dumps({**found, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {words.out}")


def windows(rounds: int) -> Iterator[dict[str, Any]]:
    """A causal language model with window 256 against `local-attention` and our own dense one."""
    for length in (2048, 4096, 8192):
        models = {"ours": language_model(m.Window(WINDOW), length), "dense": language_model(m.Causal(), length)}
        models["local-attention"] = local_transformer(length)
        tokens = torch.randint(0, VOCAB, (1, length))
        steps = {name: step_of(model, tokens) for name, model in models.items()}
        yield from compared(f"causal window {WINDOW}, {length} tokens", steps, rounds, WINDOW_GOALS, length)


def encoders(rounds: int) -> Iterator[dict[str, Any]]:
    """Encoders with global tokens and with random blocks against those of `transformers`."""
    for length in (2048, 8192):
        tokens = torch.randint(3, VOCAB, (1, length))
        targets = torch.where(torch.rand(1, length) < 0.15, tokens, IGNORE)
        sizes: dict[str, Any] = {"vocab": VOCAB, "dim": DIM, "depth": DEPTH, "heads": HEADS, "longest": length}
        ours = mf.build("longformer", **sizes, window=WINDOW, globals=1, dropout=0.0)
        pairs = {"Longformer": (ours, longformer(length)), "BigBird": (bigbird(length), their_bigbird(length))}
        for name, (mine, theirs) in pairs.items():
            steps = {"ours": masked_step(mine, tokens, targets), name: masked_step(theirs, tokens, targets)}
            goals = {name: {length: ENCODER_GOALS[name]}}
            yield from compared(f"{name}, {length} tokens", steps, rounds, goals, length)


def compared(
    what: str, steps: dict[str, Callable[[], None]], rounds: int, goals: dict[str, dict[int, float]], length: int
) -> Iterator[dict[str, Any]]:
    """One row for each candidate."""
    for step in steps.values():
        step()
    memory = {name: extra_memory(step, CPU) for name, step in steps.items()}
    times = take_turns(steps, rounds, CPU)
    for name in steps:
        row = {"what": what, "candidate": name, "seconds": statistics.median(times[name]), "memory": memory[name]}
        if name != "ours":
            goal = goals.get(name, {}).get(length)
            row |= {"ratio": paired(times["ours"], times[name])._asdict(), "goal": goal}
            if memory["ours"] and memory[name]:
                row["memory_ratio"] = memory["ours"] / memory[name]
        yield row


def slopes() -> Iterator[dict[str, Any]]:
    """How work, time and the largest tensor grow with length, attention alone, forward and backward."""
    for name, mask in LINEAR.items():
        work, clock, largest = [], [], []
        for length in SLOPE_LENGTHS:
            job = attention_job(mask, length)
            work.append(count_flops(job))
            with Largest() as seen:
                job()
            largest.append(seen.elements)
            clock.append(min(_seconds(job) for _ in range(5)))
        span = math.log(SLOPE_LENGTHS[-1] / SLOPE_LENGTHS[0])
        flops, seconds = (math.log(values[-1] / values[0]) / span for values in (work, clock))
        yield {
            "what": "growth from 2k to 16k tokens",
            "candidate": name,
            "flop_slope": flops,
            "clock_slope": seconds,
            "seconds": clock,
            "largest": largest,
            "squares": largest[-1] / SLOPE_LENGTHS[-1] ** 2,
            "good": flops <= FLOP_SLOPE and seconds <= CLOCK_SLOPE,
        }


def decoding() -> Iterator[dict[str, Any]]:
    """Writing 4,096 tokens with a window of 256: the time and the state of each stretch."""
    model = language_model(m.Window(WINDOW), DECODED).eval()
    with torch.inference_mode():
        state, token = model.start(1, capacity=DECODED), torch.zeros(1, 1, dtype=torch.long)
        for begin in range(0, DECODED, STRETCH):
            started = time.perf_counter()
            for _ in range(STRETCH):
                out = model(token, None, state)
                token, state = out.logits.argmax(-1), out.state
            speed = STRETCH / (time.perf_counter() - started)
            yield {
                "what": f"decoding with window {WINDOW}",
                "candidate": f"tokens {begin} to {begin + STRETCH}",
                "tokens_per_second": speed,
                "state": _bytes(state),
            }


def language_model(mask: Mask, length: int) -> LanguageModel:
    """The parts of `transformer-lm` with another mask."""

    def layer() -> dict[str, Any]:
        return {
            "attention": Attention(DIM, HEADS, Softmax(mask)),
            "ff": FeedForward(DIM, activation=nn.GELU()),
        }

    std = small_std(DIM)
    embed = Embedding(VOCAB, DIM, position=Learned(DIM, length, std=std), std=std)
    body = stack(DEPTH, layer, order="pre", norm=partial(nn.LayerNorm, DIM), dropout=0.0)
    return LanguageModel(embed, body, Head(DIM, VOCAB, tied=embed.token))


def bigbird(length: int) -> nn.Module:
    """BERT with BigBird's pattern: three blocks of 64 around, the first and the last, three random ones."""
    blocks = length // BLOCK
    ends = m.Positions(*range(BLOCK), *range(length - BLOCK, length))
    mask = m.Blocks(BLOCK, before=BLOCK, after=BLOCK) | m.Global(ends)
    mask = mask | m.RandomBlocks(BLOCK, RANDOM, blocks, lead=1, tail=1)
    position = Learned(DIM, length)
    return masked_encoder(
        VOCAB, DIM, DEPTH, HEADS, None, 0.0, embedded=position, mixer=lambda: Attention(DIM, HEADS, Softmax(mask))
    )


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


def step_of(model: nn.Module, tokens: Tensor) -> Callable[[], None]:
    """A training step of a language model with fused AdamW."""
    targets = tokens.roll(-1, 1)

    def loss() -> Tensor:
        if isinstance(model, LanguageModel):
            found = model.loss(TextBatch(tokens, targets))
            return found.total / found.targets
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return _step(model, loss)


def masked_step(model: nn.Module, tokens: Tensor, targets: Tensor) -> Callable[[], None]:
    """A training step of an encoder with fused AdamW; the first token is global where there is a choice."""
    words: dict[str, Any] = {}
    if type(model).__name__.startswith("Longformer"):
        first = torch.zeros_like(tokens)
        first[:, 0] = 1
        words["global_attention_mask"] = first

    def loss() -> Tensor:
        if isinstance(model, Model):
            found = model.loss(MaskedBatch(tokens, targets))
            return found.total / found.targets
        return model(tokens, labels=targets, **words).loss  # type: ignore[no-any-return]

    return _step(model, loss)


def _step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.train()

    def step() -> None:
        loss().backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def attention_job(mask: Mask, length: int) -> Callable[[], None]:
    """Attention alone, forward and backward."""
    kernel = Softmax(mask)
    place, _ = locate(torch.zeros(1, length, dtype=torch.long), None, None)
    q, k, v = (torch.randn(1, HEADS, length, DIM // HEADS, requires_grad=True) for _ in range(3))
    up = torch.randn_like(q)

    def job() -> None:
        kernel(q, k, v, place, place, NoPosition()).y.backward(up)

    return job


def shown(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, printed as they come."""
    what = None
    for row in rows:
        if row["what"] != what:
            what = row["what"]
            print(f"\n{what}")
        print("  " + _line(row), flush=True)
        yield row


def _line(row: dict[str, Any]) -> str:
    line = f"{row['candidate']:<22}"
    if "flop_slope" in row:
        line += f"FLOPs ^{row['flop_slope']:.2f}, time ^{row['clock_slope']:.2f}, largest {row['squares']:.4f} L^2"
        return f"{line}: {'reached' if row['good'] else 'MISSED'}"
    if "tokens_per_second" in row:
        return line + f"{row['tokens_per_second']:8.1f} tokens/s, state {row['state'] / 1e6:.2f} MB"
    line += f"{1e3 * row['seconds']:8.1f} ms"
    line += f"{row['memory'] / 1e6:8.0f} MB" if row["memory"] else ""
    if row.get("goal") is not None:
        verdict = "reached" if row["ratio"]["median"] <= row["goal"] else "MISSED"
        line += f"   ours/theirs {row['ratio']['median']:.2f}, goal <= {row['goal']}: {verdict}"
    if row["candidate"] == "local-attention" and "memory_ratio" in row:
        verdict = "reached" if row["memory_ratio"] <= MEMORY_GOAL else "MISSED"
        line += f"; memory {row['memory_ratio']:.2f}, goal <= {MEMORY_GOAL}: {verdict}"
    return line


def _seconds(job: Callable[[], None]) -> float:
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


def _bytes(state: Any) -> int:
    sizes: list[int] = []

    def measure(x: Tensor) -> Tensor:
        sizes.append(x.numel() * x.element_size())
        return x

    core.tree_map(measure, state)
    return sum(sizes)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch [2]")
    parser.add_argument("--rounds", type=int, default=7, help="how often everything is timed [7]")
    parser.add_argument("--only", choices=("window", "encoders", "slopes", "decode"), help="one part")
    parser.add_argument("--out", default="sparse_speed.json", help="where the numbers go [sparse_speed.json]")
    return parser.parse_args()


if __name__ == "__main__":
    main()
