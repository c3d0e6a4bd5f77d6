"""How often the host reads numbers of tensors while tokens are decoded: each time it would wait for a GPU."""

from collections import Counter
from typing import Any

import pytest
import torch
from test_static_step import build_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import manyformer as mf
from manyformer.inference.generate import beam_search, sampling

PROMPTS = [[5, 6, 7, 8, 9], [3], [11, 12, 13]]
SIZES_FROM_DATA = ("nonzero", "unique", "bincount", "masked_select", "_local_scalar_dense", "is_nonzero", "lift_fresh")


class HostReads(TorchDispatchMode):
    """Counts reads, operators whose shapes depend on numbers, and numbers of the host that become tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        is_read = name.startswith(SIZES_FROM_DATA)
        if name in ("index", "index_put_"):
            is_read = any(ids is not None and ids.dtype == torch.bool for ids in args[1])
        self.counts[name] += is_read
        return func(*args, **(kwargs or {}))


def reads_per_token(model: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, float]:
    """The reads of each of 16 tokens, in decoding as on a GPU but for paths that the device selects."""
    to_list = Tensor.tolist

    def count(new: int) -> Counter[str]:
        with monkeypatch.context() as patch, HostReads() as reads:
            for module in (sampling, beam_search):
                patch.setattr(module, "readback_interval", lambda device: 16)
            patch.setattr(Tensor, "tolist", lambda x: reads.counts.update(["tolist"]) or to_list(x))
            mf.generate(model, PROMPTS, max_new=new, stop_ids=(), **options)
        return reads.counts

    # tables that are kept are made by the first call
    _, few, many = count(32), count(16), count(32)
    return {name: (many[name] - few[name]) / 16 for name in many if many[name] > few[name]}


MODELS: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    ("transformer-lm", {}, {}),
    ("t5", {}, {}),
    ("longformer-lm", {"window": 3, "top_window": 5, "dilated_heads": 1}, {}),
    ("adaptive-span", {"max_span": 8}, {}),
]


@pytest.mark.parametrize(("name", "keywords", "expected"), MODELS, ids=[name for name, *_ in MODELS])
def test_rows_of_unlike_lengths(
    name: str, keywords: dict[str, Any], expected: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and their scores are read every 16 tokens, and nothing else."""
    model = build_model(name, keywords)
    assert reads_per_token(model, monkeypatch) == {"tolist": 2 / 16} | expected


def test_beams_are_read_as_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = reads_per_token(build_model("transformer-lm", {}), monkeypatch, beam=3)
    assert reads == {"nonzero": 1 / 16}


def test_recomputed_texts_need_no_reads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = reads_per_token(build_model("transformer-lm", {}), monkeypatch, use_cache=False)
    assert reads.pop("tolist") == 2 / 16
    assert not reads


@pytest.mark.parametrize("beam", [None, 3])
@pytest.mark.parametrize("use_cache", [True, False])
def test_seldom_reads_write_the_same_texts(beam: int | None, use_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that have ended go on until they are noticed, and add nothing."""
    model = build_model("transformer-lm", {})
    stop = mf.generate(model, PROMPTS, max_new=12, stop_ids=()).tokens
    options: dict[str, Any] = {"beam": beam, "max_new": 20, "use_cache": use_cache}
    options["stop_ids"] = (stop[0][3], stop[1][6], stop[2][9])
    expected = mf.generate(model, PROMPTS, **options)
    for module in (sampling, beam_search):
        monkeypatch.setattr(module, "readback_interval", lambda device: 7)
    actual = mf.generate(model, PROMPTS, **options)
    assert actual.tokens == expected.tokens
    assert len({len(tokens) for tokens in actual.tokens}) > 1
    assert [row[0].finish for row in actual.rows] == [row[0].finish for row in expected.rows]
