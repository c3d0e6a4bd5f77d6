"""Check released models and conventions of strangers without an adapter; measure time and memory of a large one.

Prints one row per model: how it is called, how it decodes, the contracts that failed, and whether these were expected.
Packages that are not installed are left out; all come from the package index (`pip install --no-deps NAME`).

    python benchmarks/check_strangers.py
    python benchmarks/check_strangers.py --released --path FOLDER_OF_PACKAGES
    python benchmarks/check_strangers.py --large 124
"""

import argparse
import importlib
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.analysis.contracts.found_subject import FoundSubject
from manyformer.base.errors import UserError

TESTS = Path(__file__).parents[1] / "tests" / "analysis" / "contracts"

SIZES = {"num_tokens": 97, "dim": 32, "depth": 2}
HEADS = {"heads": 2, "dim_head": 16}
SPARSE = {
    "sliding_window_size": 8,
    "compress_block_size": 4,
    "compress_block_sliding_stride": 2,
    "selection_block_size": 4,
    "num_selected_blocks": 2,
}


class Released(NamedTuple):
    """A released model: its class, the arguments of its constructor, and the contracts that must fail.

    `form_found` is False for models that can be called in no known form.
    """

    package: str
    class_name: str
    arguments: dict[str, Any]
    red: frozenset[str] = frozenset()
    form_found: bool = True

    def build(self) -> nn.Module:
        """The model with random weights."""
        torch.manual_seed(0)
        module: nn.Module = getattr(importlib.import_module(self.package), self.class_name)(**self.arguments)
        return module


# fmt: off
RELEASED = (
    Released("linear_attention_transformer", "LinearAttentionTransformerLM",
             SIZES | {"heads": 2, "max_seq_len": 256, "causal": True, "blindspot_size": 8}),
    # keys in the cache are rotated again in each step
    Released("local_attention", "LocalTransformer",
             SIZES | HEADS | {"max_seq_len": 256, "causal": True, "local_attn_window_size": 16},
             frozenset({"cached", "prefill", "beams"})),
    # the memory of compressed keys, of zeros at first, is left out of the first steps
    Released("native_sparse_attention_pytorch.transformer", "Transformer",
             SIZES | HEADS | {"kv_heads": 2, "use_sparse_attn": True, "sparse_attn_kwargs": SPARSE},
             frozenset({"cached"})),
    Released("minGRU_pytorch.minLM", "minLM", SIZES),
    Released("infini_transformer_pytorch", "InfiniTransformer", SIZES | HEADS),
    Released("recurrent_memory_transformer_pytorch", "RecurrentMemoryTransformer",
             SIZES | HEADS | {"num_memory_tokens": 8, "seq_len": 128, "causal": True}),
    Released("block_recurrent_transformer_pytorch", "BlockRecurrentTransformer",
             SIZES | HEADS
             | {"max_seq_len": 128, "block_width": 32, "num_state_vectors": 32, "recurrent_layers": (2,)}),
    Released("memorizing_transformers_pytorch", "MemorizingTransformer",
             SIZES | HEADS | {"memorizing_layers": (2,), "max_knn_memories": 1000, "num_retrieved_memories": 4},
             form_found=False),
    Released("MEGABYTE_pytorch", "MEGABYTE",
             {"num_tokens": 97, "dim": (32, 16), "max_seq_len": (32, 4), "depth": (2, 1), "dim_head": 8, "heads": 2}),
    Released("gateloop_transformer", "Transformer", SIZES),
    Released("mega_pytorch", "Mega",
             SIZES
             | {"ema_heads": 4, "attn_dim_qk": 16, "attn_dim_value": 32, "laplacian_attn_fn": False, "causal": True}),
    Released("palm_rlhf_pytorch", "PaLM", SIZES | HEADS),
    Released("simple_hierarchical_transformer", "HierarchicalTransformer",
             SIZES | HEADS | {"seq_len": 128, "hierarchies": (1, 2), "window_sizes": (16, None)}),
    Released("token_shift_gpt", "TokenShiftGPT", SIZES | {"max_seq_len": 256}),
    Released("pause_transformer", "PauseTransformer", SIZES | HEADS | {"max_pause_length": 2}, form_found=False),
)
# fmt: on


class Row(NamedTuple):
    """What was found about a model, and what was expected."""

    name: str
    form: str
    cache: str
    red: frozenset[str]
    expected: frozenset[str]
    seconds: float

    def __str__(self) -> str:
        verdict = (
            "as expected" if self.red == self.expected else f"EXPECTED {', '.join(sorted(self.expected)) or 'none'}"
        )
        red = ", ".join(sorted(self.red)) or "none"
        return f"| {self.name} | {self.form} | {self.cache} | {red} | {verdict} | {self.seconds:.1f} s |"


def check_model(name: str, build: Callable[[], nn.Module], expected: frozenset[str], *, form_found: bool = True) -> Row:
    """Check one model, at its own lengths, without compilation."""
    start = time.process_time()
    try:
        subject = FoundSubject(build())
    except UserError:
        red = frozenset[str]() if not form_found else frozenset({"no form found"})
        return Row(name, "none", "", red, expected, time.process_time() - start)
    report = mf.check(subject, skip=["compile"])
    cache = "none" if isinstance(subject.cache, str) else subject.cache.form.name
    red = frozenset(row.contract for row in report.failed)
    return Row(name, subject.found.form.name, cache, red, expected, time.process_time() - start)


def released_rows() -> Iterator[Row]:
    """The released models whose packages are installed."""
    for model in RELEASED:
        try:
            importlib.import_module(model.package)
        except ImportError as error:
            print(f"{model.package}: left out, {error}")
            continue
        yield check_model(model.package, model.build, model.red, form_found=model.form_found)


def convention_rows() -> Iterator[Row]:
    """The conventions that the tests know, in small models of our own words."""
    sys.path.append(str(TESTS))
    strangers = importlib.import_module("strangers")
    for model, (_, _, red) in strangers.STRANGERS.items():
        yield check_model(model.__name__, model, frozenset(red))


class GPT(nn.Module):
    """A dense decoder as nanoGPT writes it."""

    def __init__(self, vocabulary: int, depth: int, heads: int, dim: int) -> None:
        super().__init__()
        self.block_size = 1024
        self.wte = nn.Embedding(vocabulary, dim)
        self.wpe = nn.Embedding(self.block_size, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits of the last position, or of all with the loss."""
        length = idx.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.wte.weight.dtype)
        x = self.wte(idx) + self.wpe(torch.arange(length))
        x = self.blocks(x, mask=mask, is_causal=True)
        if targets is None:
            return self.head(x[:, -1:]), None
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


SIZES = {10: (1024, 5, 6, 384), 124: (50257, 12, 12, 768)}
"""Vocabulary, depth, heads and width by millions of parameters."""


def measure_step(millions: int) -> int:
    """The most memory of a process that takes one step of training with one row, in MB."""
    model = GPT(*SIZES[millions])
    tokens = torch.randint(SIZES[millions][0], (1, 1024))
    _, loss = model(tokens, tokens)
    assert loss is not None
    loss.backward()  # type: ignore[no-untyped-call]
    return _peak_megabytes()


def measure_large(millions: int) -> None:
    """Print time and memory of the default check of a dense decoder, next to those of a step of training."""
    # each in a process of its own: what the step leaves in the allocator is no memory of the check
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        step = pool.submit(measure_step, millions).result()
    model = GPT(*SIZES[millions])
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M parameters, step {step} MB")
    wall = time.perf_counter()
    processor = time.process_time()
    report = mf.check(model, on_row=lambda row: print(row.contract, row.verdict, f"{time.perf_counter() - wall:.0f} s"))
    print(report.heading)
    print(
        f"{time.perf_counter() - wall:.0f} s, processor {time.process_time() - processor:.0f} s, {_peak_megabytes()} MB"
    )


def _peak_megabytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    """Print the rows that the options name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--released", action="store_true", help="released models alone")
    parser.add_argument("--path", help="a folder of packages that is searched too")
    parser.add_argument("--large", type=int, choices=(10, 124), help="measure a model of so many million parameters")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.large is not None:
        measure_large(arguments.large)
        return
    torch.set_num_threads(1)
    if arguments.path is not None:
        sys.path.append(arguments.path)
    print("| model | called as | decodes as | red | | processor |\n| --- | --- | --- | --- | --- | --- |")
    for row in released_rows():
        print(row, flush=True)
    if not arguments.released:
        for row in convention_rows():
            print(row, flush=True)


if __name__ == "__main__":
    main()
