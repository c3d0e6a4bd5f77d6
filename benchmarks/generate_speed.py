"""Greedy decoding with imported weights against `transformers`' own `generate`, on one thread of a CPU.

    python benchmarks/generate_speed.py                               # minutes: GPT-2 small has 124 million weights
    python benchmarks/generate_speed.py --only small --rounds 5       # seconds
    python benchmarks/generate_speed.py --only batch --rounds 3       # eight prompts at once

Every round runs both once, on the same weights and the same prompt; what counts is the median over rounds of the ratio
within a round. Both write the same tokens, or nothing is measured.
"""

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import frame
import torch
import transformers
from peers import writer_of

from manyformer.analysis.benchmarks import paired_ratio, take_turns
from manyformer.conversion.hugging_face import import_model

PROMPT, NEW = 16, 64
BATCH, BATCH_NEW = 8, 256
# 1.5 times as many tokens a second
GOAL = 1 / 1.5

SMALL = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 8000}
SMALL_LLAMA = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
LARGE_LLAMA = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}


def small(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Models whose calls cost more than their products."""
    yield from _contest("GPT-2, d 256, 4 layers", _gpt2(SMALL), rounds)
    yield from _contest("Llama, d 256, 4 layers", _llama({**SMALL_LLAMA, "intermediate_size": 688}, 8000), rounds)


def large(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Models of the size of GPT-2 small."""
    yield from _contest("GPT-2 small", _gpt2({}), rounds)
    yield from _contest("Llama, d 768, 12 layers", _llama({**LARGE_LLAMA, "intermediate_size": 2048}, 32000), rounds)


def batch(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Eight prompts at once, where keys and values of long rows cost as much as the weights."""
    yield from _contest("GPT-2 small", _gpt2({}), rounds, BATCH, BATCH_NEW)


def _gpt2(sizes: dict[str, int]) -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def _llama(sizes: dict[str, int], vocab: int) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=vocab))


def _contest(what: str, theirs: Any, rounds: int, rows: int = 1, new: int = NEW) -> Iterator[frame.BenchmarkRow]:
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(Path(folder))
        ours = import_model(folder).model
    prompt = torch.randint(0, ours.spec.keywords["vocab"], (rows, PROMPT))
    # the name selects the way in which a model of transformers is called
    writers = {
        "ours": writer_of("ours", ours, prompt, new),
        "transformers": writer_of("GPT-2", theirs.eval(), prompt, new),
    }
    first, second = (write().flatten().tolist() for write in writers.values())
    assert first == second, f"{what}: the texts differ"
    times = take_turns(writers, rounds, frame.CPU)
    for name in writers:
        row: frame.BenchmarkRow = {"contest": f"{what}, rows: {rows}, {new} tokens after {PROMPT}", "candidate": name}
        row |= {"tokens_per_second": rows * new / statistics.median(times[name])}
        if name != "ours":
            row |= {"ratio": paired_ratio(times["ours"], times[name])._asdict(), "goal": GOAL}
        yield row


if __name__ == "__main__":
    frame.run(__doc__, {"small": small, "large": large, "batch": batch}, rounds=9, out="generate_speed.json")
