"""Linear-time attention against released packages and our dense model: training steps, growth with length, decoding.

    python benchmarks/linear_speed.py                     # everything, about 25 minutes on two quiet cores
    python benchmarks/linear_speed.py --only step --rounds 3
    python benchmarks/linear_speed.py --only growth       # no other package is needed

Width 256, 4 heads, 4 layers. Every round runs each candidate once; what counts is the median over rounds of the ratio
within a round. Growth is the slope of logarithms from 1,024 tokens to 16,384.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import frame
import torch
from floor import Adding, estimated, floor
from steps import language_step
from torch import nn

import manyformer as mf
from manyformer.analysis.benchmarks import paired_ratio
from manyformer.inference.generate.next_token import bind_next_token, storage_bytes
from manyformer.recipes.parts.baselines import attention_layers, language_model, sinusoidal_embedding

SIZE: dict[str, Any] = {"vocab": 256, "dim": 256, "depth": 4, "heads": 4}
FEATURES, SLOTS, BLIND = 256, 256, 64
CHUNK = 64
LENGTHS = (1024, 2048, 4096, 8192, 16384)
OURS = ("linear-transformer", "performer", "rfa", "linformer")
PERFORMER_GOALS = {"performer-pytorch": 0.06}
GROWTH_GOALS = {"operations": 1.02, "seconds": 1.2, "memory": 1.1}
EARLY, LATE, STEADY_GOAL = 100, 8000, 1.10


class Contest(NamedTuple):
    """Candidates for one length, and by how much the first may be slower than which other."""

    title: str
    length: int
    makers: dict[str, Callable[[int], nn.Module]]
    goals: dict[str, float]


def contests() -> list[Contest]:
    """What the goals are about."""
    linear, dense = ours("linear-transformer"), ours("transformer-lm")
    return [
        Contest(
            "causal Performer",
            2048,
            {"ours": ours("performer", features=FEATURES), "performer-pytorch": performer_pytorch},
            PERFORMER_GOALS,
        ),
        *(
            Contest(
                "causal linear attention",
                length,
                {"ours": linear, "linear-attention-transformer": linear_attention_transformer, "our dense": dense},
                {"linear-attention-transformer": 1.05, "our dense": goal},
            )
            for length, goal in ((2048, 0.75), (8192, 0.35))
        ),
        *(
            Contest(
                "Linformer",
                length,
                {
                    "ours": ours(
                        "linformer", projected_length=SLOTS, projection_sharing="heads", dropout=0.0, norm_order="pre"
                    ),
                    "linformer": linformer,
                },
                {"linformer": 1.0},
            )
            for length in (2048, 8192)
        ),
    ]


def training(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Time and extra memory of a training step of one row."""
    for contest in contests():
        tokens = torch.randint(0, SIZE["vocab"], (1, contest.length))
        steps = {name: language_step(make(contest.length), tokens) for name, make in contest.makers.items()}
        yield from frame.contest(f"{contest.title}, {contest.length} tokens", steps, rounds, contest.goals)


def least(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """What a Performer's step costs without its features, as a share of the other package's."""
    length = 2048
    tokens = torch.randint(0, SIZE["vocab"], (1, length))
    embed = sinusoidal_embedding(SIZE["vocab"], SIZE["dim"], dropout=0.0)
    layers = attention_layers(SIZE["dim"], SIZE["heads"], None, lambda _: Adding())
    bare = language_model(embed, SIZE["depth"], layers, dropout=0.0)
    products = estimated(SIZE["heads"], length, SIZE["dim"] // SIZE["heads"], FEATURES, CHUNK)
    steps = {
        "no attention, bare products": floor(language_step(bare, tokens), products, SIZE["depth"]),
        "no attention": language_step(bare, tokens),
        "ours": language_step(ours("performer", features=FEATURES)(length), tokens),
        "performer-pytorch": language_step(performer_pytorch(length), tokens),
    }
    yield from frame.contest(f"the least a causal Performer can cost, {length} tokens", steps, rounds, PERFORMER_GOALS)


def growth(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """How operations, time and memory of a training step grow with the length."""
    for recipe in OURS:
        extra_keywords = {"features": FEATURES} if recipe == "performer" else {}
        if recipe == "linformer":
            extra_keywords = {"projected_length": SLOTS, "projection_sharing": "layers", "dropout": 0.0}
        tokens = {length: torch.randint(0, SIZE["vocab"], (1, length)) for length in LENGTHS}
        jobs = {length: language_step(ours(recipe, **extra_keywords)(length), row) for length, row in tokens.items()}
        yield from frame.growth(recipe, jobs, max(3, rounds // 3), GROWTH_GOALS)


def decoding(_: int) -> Iterator[frame.BenchmarkRow]:
    """Time of a token at two positions, in turns, and the size of the state."""
    for recipe in ("linear-transformer", "performer", "rfa"):
        model: Any = ours(recipe)(LATE).eval()
        with torch.inference_mode():
            following = bind_next_token(model)
            states = {}
            for position in (EARLY, LATE):
                state = model.init_state(1)
                states[position] = model(torch.randint(0, SIZE["vocab"], (1, position)), state=state).state
            times: dict[int, list[float]] = {EARLY: [], LATE: []}
            for _ in range(300):
                for position, state in states.items():
                    token = torch.randint(0, SIZE["vocab"], (1, 1))
                    begun = time.perf_counter()
                    following(token, state, None)
                    times[position].append(time.perf_counter() - begun)
        sizes = [storage_bytes(state) for state in states.values()]
        assert sizes[0] == sizes[1], sizes
        yield {
            "contest": f"a token at position {LATE} against one at {EARLY}",
            "candidate": recipe,
            "seconds": statistics.median(times[LATE]),
            "ratio": paired_ratio(times[LATE], times[EARLY])._asdict(),
            "goal": STEADY_GOAL,
            "memory": sizes[1],
        }


def ours(recipe: str, **keywords: Any) -> Callable[[int], nn.Module]:
    """A recipe of ours, long enough."""

    def make(length: int) -> nn.Module:
        parameters = mf.recipes()[recipe].signature.parameters
        return mf.build(recipe, **SIZE, **keywords, **({"max_length": length} if "max_length" in parameters else {}))

    return make


def performer_pytorch(length: int) -> nn.Module:
    """`performer_pytorch.PerformerLM`, causal, with as many features, never drawn anew."""
    from performer_pytorch import PerformerLM

    return PerformerLM(
        num_tokens=SIZE["vocab"],
        max_seq_len=length,
        dim=SIZE["dim"],
        depth=SIZE["depth"],
        heads=SIZE["heads"],
        dim_head=SIZE["dim"] // SIZE["heads"],
        causal=True,
        nb_features=FEATURES,
        feature_redraw_interval=None,
    )


def linear_attention_transformer(length: int) -> nn.Module:
    """`linear_attention_transformer.LinearAttentionTransformerLM`, which does not see the last `BLIND` tokens."""
    from linear_attention_transformer import LinearAttentionTransformerLM

    return LinearAttentionTransformerLM(
        num_tokens=SIZE["vocab"],
        dim=SIZE["dim"],
        depth=SIZE["depth"],
        heads=SIZE["heads"],
        dim_head=SIZE["dim"] // SIZE["heads"],
        max_seq_len=length,
        causal=True,
        blindspot_size=BLIND,
        use_axial_pos_emb=False,
    )


def linformer(length: int) -> nn.Module:
    """`linformer.LinformerLM`: keys and values each with a projection, for all heads."""
    from linformer import LinformerLM

    return LinformerLM(
        num_tokens=SIZE["vocab"],
        dim=SIZE["dim"],
        seq_len=length,
        depth=SIZE["depth"],
        k=SLOTS,
        heads=SIZE["heads"],
        dim_head=SIZE["dim"] // SIZE["heads"],
    )


if __name__ == "__main__":
    parts = {"step": training, "floor": least, "growth": growth, "decode": decoding}
    frame.run(__doc__, parts, rounds=9, out="linear_speed.json")
