"""Static steps: the tokens and logits of other decoding, on buffers that stay where they are, also when captured."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from operator_tape import TapeEngine
from torch import Tensor

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.inference.generate import next_token
from manyformer.inference.generate.captured_step import CudaGraphEngine
from manyformer.inference.generate.next_token import (
    CachedFeed,
    LogitsFeed,
    StaticFeed,
    bucket_columns,
    rounded_capacity,
)
from manyformer.nn import SoftmaxKernel
from manyformer.nn.core import tree_map
from manyformer.nn.positions import RotaryPosition
from perturbing import perturb

SMALL = {"vocab": 29, "dim": 16, "depth": 2, "heads": 4}
SOFTMAX: list[tuple[str, dict[str, Any]]] = [
    ("transformer-lm", {}),
    ("compose", {"position": "rope", "kv_heads": 2}),
    ("compose", {"position": "learned", "max_length": 40}),
    ("compose", {"position": "alibi", "kv_heads": 2}),
    ("t5", {}),
    ("shaw", {}),
    ("longformer-lm", {"window": 3, "top_window": 5, "dilated_heads": 1}),
    ("sparse-transformer", {"pattern": "fixed", "stride": 4, "summary": 1, "max_length": 40}),
    ("diff-transformer", {}),
    ("fox", {}),
    ("mixtral", {}),
    ("gpt-oss", {}),
    ("deepseek", {}),
    ("qwen3-next", {}),
    ("gmlp", {"max_length": 40}),
    ("moba", {"block_length": 3, "blocks_seen": 2}),
    ("image-transformer", {}),
    ("compose", {"pattern": "DF", "position": "rope"}),
    ("baseline-2026", {"window": 3, "value_residual": True, "canon": "AC"}),
]
RECURRENT: list[tuple[str, dict[str, Any]]] = [
    ("linear-transformer", {"update_rule": "delta"}),
    ("performer", {"features": 8}),
    ("rfa", {"features": 8}),
    ("gla", {}),
    ("deltanet", {}),
    ("gated-deltanet", {}),
    ("kda", {}),
    ("retnet", {}),
    ("lightning", {}),
    ("mamba", {}),
    ("mamba-2", {}),
    ("rwkv-7", {"head_dim": 4}),
    ("lstm-lm", {}),
]
MODELS = SOFTMAX + RECURRENT
NAMES = [f"{name} {keywords}" for name, keywords in MODELS]
PROMPTS = [[5, 6, 7, 8, 9], [3], [11, 12, 13]]
NEW = 12


def build_model(name: str, keywords: dict[str, Any]) -> Any:
    signature = mf.recipes()[name].signature.parameters
    model: Any = mf.build(name, **{key: value for key, value in SMALL.items() if key in signature}, **keywords)
    perturb(model, 0.2)
    return model.double().eval()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of 8 columns at first, so that texts of a few tokens pass several sizes."""
    monkeypatch.setattr(next_token, "MIN_COLUMNS", 8)


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> TapeEngine:
    """Steps are captured on tapes in place of a GPU."""
    engine = TapeEngine()

    def tape_feed(eager: CachedFeed, capacity: int, path: str) -> LogitsFeed:
        return eager if path == "eager" else StaticFeed(eager, capacity, engine, forced=True)

    monkeypatch.setattr(next_token, "step_feed", tape_feed)
    return engine


def assert_same_texts(model: Any, **options: Any) -> str:
    """That static steps give the tokens of eager ones; returns how the tokens were decoded."""
    options = {"max_new": NEW, "stop_ids": ()} | options
    expected = mf.generate(model, PROMPTS, step_path="eager", **options)
    actual = mf.generate(model, PROMPTS, step_path="static", **options)
    assert actual.tokens == expected.tokens
    assert expected.stats.cache == "with cache"
    return actual.stats.cache


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("name", "keywords"), MODELS, ids=NAMES)
def test_texts_are_those_of_eager_steps(name: str, keywords: dict[str, Any]) -> None:
    model = build_model(name, keywords)
    assert assert_same_texts(model) == "with cache, static steps"
    assert_same_texts(model, beam=3)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("name", "keywords"), MODELS, ids=NAMES)
def test_texts_are_those_of_captured_steps(name: str, keywords: dict[str, Any], tapes: TapeEngine) -> None:
    model = build_model(name, keywords)
    assert assert_same_texts(model) == "with cache, static steps captured as CUDA graphs"
    assert_same_texts(model, beam=3)
    assert tapes.events.count("capture") >= 4


def feed_of(model: Any, tokens: Tensor, engine: TapeEngine | None = None) -> StaticFeed:
    return StaticFeed(CachedFeed(model, None, *tokens.shape), tokens.shape[1], engine, forced=True)


@pytest.mark.parametrize("engine", [None, TapeEngine()], ids=["static", "captured"])
@pytest.mark.parametrize(("name", "keywords"), MODELS[::3], ids=NAMES[::3])
def test_logits_are_those_of_forward(name: str, keywords: dict[str, Any], engine: TapeEngine | None) -> None:
    model, tokens = build_model(name, keywords), torch.randint(0, 29, (3, 22))
    with torch.inference_mode():
        feed = feed_of(model, tokens, engine)
        actual = torch.stack([feed(tokens, end) for end in range(4, 23)], 1)
        expected = model(tokens).logits[:, 3:]
    torch.testing.assert_close(actual, expected.float(), atol=1e-5, rtol=0)


def test_an_encoder_decoder() -> None:
    assert_same_texts(build_model("transformer", {}))
    assert_same_texts(build_model("transformer", {}), beam=3)


def test_a_captured_encoder_decoder(tapes: TapeEngine) -> None:
    assert "captured" in assert_same_texts(build_model("transformer", {}), beam=2)


def buffers_of(feed: StaticFeed) -> list[int]:
    pointers: list[int] = []
    tree_map(lambda tensor: pointers.append(tensor.data_ptr()) or tensor, feed.state)
    return pointers


def test_the_order_of_calls_and_the_buffers_of_a_captured_step() -> None:
    model, engine, tokens = build_model("gated-deltanet", {}), TapeEngine(), torch.randint(0, 29, (2, 20))
    with torch.inference_mode():
        feed = feed_of(model, tokens, engine)
        for end in (8, 9):
            feed(tokens, end)
        assert engine.events == []
        logits = feed(tokens, 10)
        assert engine.events == ["side stream", "graph", "capture"]
        buffers, numbers = buffers_of(feed), logits.clone()
        order = torch.tensor([1, 0])
        for end in (11, 12, 13):
            assert feed(tokens, end).data_ptr() != logits.data_ptr()
            feed.reorder(order)
            assert buffers_of(feed) == buffers
        # what was returned is not written again, and one graph serves all tokens
        assert torch.equal(logits, numbers)
        assert len(engine.events) == 3
        feed.select_rows(torch.tensor([1]))
        feed(tokens[1:], 14)
    assert engine.events == 2 * ["side stream", "graph", "capture"]


def test_a_replay_that_differs_from_the_step_is_an_error() -> None:
    """A number that Python counts is frozen by a capture, and noticed at the second replay."""
    model, engine, tokens = build_model("transformer-lm", {}), TapeEngine(), torch.randint(0, 29, (2, 20))
    with torch.inference_mode():
        feed = feed_of(model, tokens, engine)
        for end in (8, 9):
            feed(tokens, end)
        step: Any = feed.step
        feed.step = lambda tokens, state, memory: (step(tokens, state, memory)[0] * feed.eager.length, state)
        feed(tokens, 10)
        with pytest.raises(UserError, match="the captured step and the step itself give logits that are"):
            feed(tokens, 11)


def test_what_a_graph_reads_exists_as_long_as_the_graph() -> None:
    """The model holds its weights; tables that grow later, the step itself."""
    model, engine, tokens = build_model("compose", {"position": "rope"}), TapeEngine(), torch.randint(0, 29, (2, 20))
    with torch.inference_mode():
        feed = feed_of(model, tokens, engine)
        for end in (8, 9, 10):
            feed(tokens, end)
    assert feed.captured is not None
    held = {tensor.untyped_storage().data_ptr() for tensor in feed.captured._outer}
    weights = {weight.data_ptr() for weight in model.parameters()}
    tables = {module._cache.table.data_ptr() for module in model.modules() if isinstance(module, RotaryPosition)}
    assert tables
    assert tables <= held
    assert not weights & held
    assert weights | tables <= feed.captured._addresses


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("early-exit-lm", {}, "tokens leave an early-exit stack at different layers"),
    ("mixture-of-depths", {}, "MixtureOfDepths: the host reads what aten"),
    ("transformer-xl", {}, "a state counts in numbers of the host"),
    ("reformer-strict", {}, "LSHKernel: it does not serve the columns of static caches"),
    ("compose", {"max_length": 64, "attention": "blocked"}, "path 'blocked' cannot serve the static step"),
]


@pytest.mark.parametrize(("name", "keywords", "reason"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_what_has_no_static_step_is_refused_in_a_sentence(name: str, keywords: dict[str, Any], reason: str) -> None:
    if keywords:
        model = build_model("transformer-lm", {})
        for module in model.modules():
            if isinstance(module, SoftmaxKernel):
                module.path = "blocked"
    else:
        model = build_model(name, keywords)
    with pytest.raises(UserError, match=f"this model has no static step: .*{reason}"):
        mf.generate(model, PROMPTS, max_new=4, step_path="static")


def test_hooks_are_called_at_every_step() -> None:
    model = build_model("transformer-lm", {})
    model.body.get_submodule("1.ff").register_forward_hook(lambda *call: None)
    with pytest.raises(UserError, match="has hooks, is called at every step"):
        mf.generate(model, PROMPTS, max_new=4, step_path="static")


def test_impossible_choices_are_refused() -> None:
    model = build_model("transformer-lm", {})
    with pytest.raises(UserError, match="CUDA graphs need a CUDA device: this model is on the device cpu"):
        mf.generate(model, PROMPTS, step_path="graph")
    with pytest.raises(UserError, match="without a cache there are no steps"):
        mf.generate(model, PROMPTS, step_path="static", use_cache=False)
    with pytest.raises(UserError, match="step_path must be one of auto, eager, static, graph, got 'fast'"):
        mf.generate(model, PROMPTS, step_path="fast")  # type: ignore[arg-type]


def test_a_model_without_static_steps_goes_on_eagerly_and_says_so(tapes: TapeEngine) -> None:
    model, tokens = build_model("mixture-of-depths", {}), torch.randint(0, 29, (2, 20))
    with torch.inference_mode():
        feed = StaticFeed(CachedFeed(model, None, 2, 20), 20, tapes, forced=False)
        actual = torch.stack([feed(tokens, end) for end in range(4, 21)], 1)
        torch.testing.assert_close(actual, model(tokens).logits[:, 3:].float(), atol=1e-5, rtol=0)
    assert feed.steps.startswith("eager steps, because MixtureOfDepths: the host reads")
    assert tapes.events == []


class OutOfMemoryEngine(TapeEngine):
    def graph(self) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")


def test_steps_go_on_where_a_capture_fails() -> None:
    model, tokens = build_model("gated-deltanet", {}), torch.randint(0, 29, (2, 20))
    for forced in (False, True):
        feed = StaticFeed(CachedFeed(model, None, 2, 20), 20, OutOfMemoryEngine(), forced=forced)
        with torch.inference_mode():
            actual = [feed(tokens, end) for end in (10, 11)]
            if forced:
                with pytest.raises(UserError, match="cannot be captured as a CUDA graph: CUDA out of memory"):
                    feed(tokens, 12)
                return
            actual += [feed(tokens, end) for end in range(12, 21)]
            expected = model(tokens).logits[:, 9:]
        torch.testing.assert_close(torch.stack(actual, 1), expected.float(), atol=1e-5, rtol=0)
        assert feed.steps == "static steps, not captured because CUDA out of memory. Tried to allocate 2 GiB"


def test_cuda_graphs_are_captured_as_torch_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-ups run on a stream that waits for the current one, which then waits for it; names are those of torch."""
    events: list[str] = []

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.name = "side"

        def wait_stream(self, stream: "Stream") -> None:
            events.append(f"{self.name} waits for {stream.name}")

    current = Stream()
    current.name = "current"
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)

    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        events.append(f"on {stream.name}")
        yield
        events.append("off")

    monkeypatch.setattr(torch.cuda, "stream", use)
    engine = CudaGraphEngine(torch.device("cuda", 1))
    with engine.side_stream():
        events.append("work")
    assert events == ["side waits for current", "on side", "work", "off", "current waits for side"]
    parameters = inspect.signature(torch.cuda.graph.__init__).parameters
    assert {"stream", "capture_error_mode"} <= parameters.keys()


def test_buckets_double_up_to_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_token, "MIN_COLUMNS", 128)
    assert [bucket_columns(length, 1100) for length in (1, 128, 129, 512, 1025)] == [128, 128, 256, 512, 1280]
    assert bucket_columns(3, 20) == 128


def test_texts_of_similar_lengths_share_a_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sizes per doubling: a quarter more than is needed at most."""
    monkeypatch.setattr(next_token, "MIN_COLUMNS", 128)
    sizes = [rounded_capacity(capacity) for capacity in range(1, 2049)]
    assert sorted(set(sizes)) == [
        128,
        160,
        192,
        224,
        256,
        320,
        384,
        448,
        *range(512, 1024, 128),
        *range(1024, 2049, 256),
    ]
    assert all(capacity <= size <= max(128, 1.25 * capacity) for capacity, size in enumerate(sizes, 1))
