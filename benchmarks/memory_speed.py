"""What a memory costs, and what it saves: training with one, scoring a text with it or without, looking keys up.

    python benchmarks/memory_speed.py                           # about 8 minutes on two quiet cores
    python benchmarks/memory_speed.py --only training --rounds 5

A training step reads a segment of 512 tokens after a memory of 512, the same one every time. A text is scored by a
small model that is trained before, in segments that remember, and by reading for each token the last 256 again. The
nearest 32 of 65,536 keys are looked up exactly for each query and head.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import frame
import torch
from peers import Size
from steps import train
from torch import Tensor, nn

import manyformer as mf
from manyformer.config import RunConfig
from manyformer.inference.evaluate.eval_data import open_run
from manyformer.models import LanguageModel
from manyformer.nn.batches import CausalLMBatch
from manyformer.nn.ops.top_products import top_products, top_products_reference

SIZE = Size(dim=256, depth=4, heads=4, vocab=256, max_length=512)
BATCH, SEGMENT, MEMORY = 4, 512, 512
TRAINING_GOALS = {"x-transformers, rel_pos_bias": 0.6, "XLNet": 0.7}

WINDOW, SCORED = 256, 512
SCORING_GOALS = {"re-reading": 0.05}
SCORING_LOSS = 0.01
LOOKED_UP = {"queries": 512, "heads": 8, "width": 64, "pairs": 1 << 16, "neighbours": 32}
LOOKUP_GOALS = {"one product": 3.0}
RUN = {
    "recipe": "transformer-xl",
    "model": {"dim": 128, "depth": 3, "heads": 4, "memory_length": 128, "dropout": 0.0, "norm_order": "pre"},
    "data": {"path": "stdlib", "length": 128, "packing": "contiguous"},
    "batch": {"tokens": 2048},
    "optim": {"lr": 2e-3},
    "limits": {"steps": 300},
    "evaluate": {"every": None},
    "device": "cpu",
}
"""Two minutes of training, so that losses say something."""


def training(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Time and memory of a training step."""
    tokens, memory_tokens = (torch.randint(0, SIZE.vocab, (BATCH, n)) for n in (SEGMENT, MEMORY))
    steps = {name: make(tokens, memory_tokens) for name, make in TRAINERS.items()}
    yield from frame.contest(f"training step, batch {BATCH} x ({MEMORY} + {SEGMENT})", steps, rounds, TRAINING_GOALS)


def ours(tokens: Tensor, memory_tokens: Tensor) -> frame.Step:
    """`transformer-xl`."""
    keywords = {**SIZE._asdict(), "memory_length": MEMORY, "dropout": 0.0}
    keywords.pop("max_length")
    model = mf.build("transformer-xl", **keywords)
    assert isinstance(model, LanguageModel)
    state = model.train().loss(CausalLMBatch(memory_tokens, memory_tokens), state=model.init_state(BATCH)).state
    batch = CausalLMBatch(tokens, tokens.roll(-1, 1))

    def loss() -> Tensor:
        output = model.loss(batch, state=state)
        return output.total / output.targets

    return train(model, loss)


def x_transformers(tokens: Tensor, memory_tokens: Tensor) -> frame.Step:
    """x-transformers with `max_mem_len` and its relative bias."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=SIZE.dim, depth=SIZE.depth, heads=SIZE.heads, attn_dim_head=SIZE.dim // SIZE.heads, rel_pos_bias=True
    )
    model = TransformerWrapper(
        num_tokens=SIZE.vocab, max_seq_len=SEGMENT, max_mem_len=MEMORY, use_abs_pos_emb=False, attn_layers=layers
    )
    with torch.no_grad():
        _, memories = model(memory_tokens, return_mems=True)
    targets = tokens.roll(-1, 1)

    def loss() -> Tensor:
        logits, _ = model(tokens, mems=memories, return_mems=True)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return train(model, loss)


def xlnet(tokens: Tensor, memory_tokens: Tensor) -> frame.Step:
    """`transformers.XLNetLMHeadModel` in one direction."""
    from transformers import XLNetConfig, XLNetLMHeadModel

    config = XLNetConfig(
        vocab_size=SIZE.vocab,
        d_model=SIZE.dim,
        n_layer=SIZE.depth,
        n_head=SIZE.heads,
        d_inner=4 * SIZE.dim,
        ff_activation="relu",
        attn_type="uni",
        mem_len=MEMORY,
        use_mems_train=True,
        dropout=0.0,
    )
    model = XLNetLMHeadModel(config)
    with torch.no_grad():
        memories = model(memory_tokens, use_mems=True).mems
    targets = tokens.roll(-1, 1)

    def loss() -> Tensor:
        logits = model(tokens, mems=memories, use_mems=True).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return train(model, loss)


TRAINERS = {"ours": ours, "x-transformers, rel_pos_bias": x_transformers, "XLNet": xlnet}


def scoring(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Time for a stretch of held-out text, and its loss."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        mf.train(RunConfig.model_validate({**RUN, "out": str(out)}), on_event=lambda event: None)
        model, text = mf.load(out), _text(out)
    assert isinstance(model, LanguageModel)
    methods: dict[str, Any] = {"memory": lambda: by_memory(model, text), "re-reading": lambda: by_reading(model, text)}
    losses = {name: method() for name, method in methods.items()}
    loss_text = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
    verdict = "reached" if losses["memory"] <= losses["re-reading"] * (1 + SCORING_LOSS) else "MISSED"
    title = f"scoring {SCORED} characters"
    summary = f"loss in nats a character: {loss_text}; goal: at most {SCORING_LOSS:.0%} more: {verdict}"
    yield {"contest": title, "candidate": summary, "losses": losses}
    yield from frame.contest(title, methods, rounds, SCORING_GOALS)


def lookup(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Time to find the nearest of many keys, and for all the products alone."""
    heads, width = LOOKED_UP["heads"], LOOKED_UP["width"]
    q, k = (nn.functional.normalize(torch.randn(heads, LOOKED_UP[n], width), dim=-1) for n in ("queries", "pairs"))
    count = LOOKED_UP["neighbours"]
    torch.testing.assert_close(
        top_products(q[:1, :64], k[:1], count).products, top_products_reference(q[:1, :64], k[:1], count).products
    )
    methods: dict[str, frame.Step] = {
        "lookup": lambda: top_products(q, k, count),
        "one product": lambda: torch.bmm(q, k.mT),
    }
    title = "{queries} queries of {heads} heads among {pairs} keys of width {width}".format(**LOOKED_UP)
    yield from frame.contest(title, methods, rounds, LOOKUP_GOALS)


def by_memory(model: LanguageModel, text: Tensor) -> float:
    """The mean loss of the last tokens, read in segments after as much text as the other way has read."""
    with torch.inference_mode():
        state = model(text[:, : WINDOW - 1], None, model.init_state(1)).state
        nats = 0.0
        for begin in range(WINDOW - 1, WINDOW - 1 + SCORED, 128):
            end = min(begin + 128, WINDOW - 1 + SCORED)
            scored = model.score(CausalLMBatch(text[:, begin:end], text[:, begin + 1 : end + 1]), state=state)
            state, nats = scored.state, nats + float(scored.nll)
    return nats / SCORED


def by_reading(model: LanguageModel, text: Tensor) -> float:
    """The same, each token after a pass over the last `WINDOW` ones."""
    nats = 0.0
    with torch.inference_mode():
        for end in range(WINDOW, WINDOW + SCORED):
            logits = model(text[:, end - WINDOW : end]).logits[:, -1]
            nats += float(nn.functional.cross_entropy(logits, text[:, end]))
    return nats / SCORED


def _text(folder: Path) -> Tensor:
    held = open_run(folder).load_split("valid").batches
    assert held is not None
    rows = torch.cat([batch.tokens[:1] for batch, _ in zip(held, range(1 + (WINDOW + SCORED) // 128))], 1)
    return rows[:, : WINDOW + SCORED]


if __name__ == "__main__":
    frame.run(__doc__, {"training": training, "scoring": scoring, "lookup": lookup}, rounds=11, out="memory_speed.json")
