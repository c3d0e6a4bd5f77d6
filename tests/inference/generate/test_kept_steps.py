"""Captured steps that stay with their model: one capture for many texts, and the results of the present weights."""

import gc
import weakref
from typing import Any

import pytest
import torch
from operator_tape import TapeEngine, TapeGraph
from test_static_step import MODELS, NAMES, build_model

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.inference.generate import Decoding, kept_steps, next_token, stream
from manyformer.inference.generate.kept_steps import forget_captured_steps
from manyformer.inference.generate.next_token import CachedFeed, LogitsFeed, StaticFeed
from manyformer.nn import SoftmaxKernel
from manyformer.nn.masks import Causal, Window
from manyformer.nn.positions import TransformerXLPosition
from perturbing import perturb

PROMPTS = [[5, 6, 7, 8, 9], [3], [11, 12, 13]]


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> TapeEngine:
    """Steps are captured on tapes in place of a GPU, for caches of 16, 32 and 64 columns."""
    engine = TapeEngine()

    def tape_feed(eager: CachedFeed, capacity: int, path: str) -> LogitsFeed:
        return eager if path == "eager" else StaticFeed(eager, capacity, engine, forced=True)

    monkeypatch.setattr(next_token, "MIN_COLUMNS", 16)
    monkeypatch.setattr(next_token, "step_feed", tape_feed)
    return engine


def captures(engine: TapeEngine) -> int:
    return engine.events.count("capture")


def texts(model: Any, prompts: list[list[int]] = PROMPTS, **changes: Any) -> Any:
    options: dict[str, Any] = {"max_new": 9, "stop_ids": (), "step_path": "graph"} | changes
    return mf.generate(model, prompts, **options).tokens


def assert_current(model: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> None:
    """That captured steps write what eager ones write now."""
    assert texts(model, prompts, **options) == texts(model, prompts, step_path="eager", **options)


def test_one_capture_serves_many_calls(engine: TapeEngine) -> None:
    model = build_model("compose", {"position": "rope", "kv_heads": 2})
    for prompts in (PROMPTS, [[1], [2, 3], [4, 5, 6, 7]], [[9, 8, 7], [6], [5]]):
        assert_current(model, prompts)
    assert captures(engine) == 1
    # batches of as many rows within one call, and sampling, whose choice is outside the step
    assert_current(model, 2 * PROMPTS, batch=3)
    texts(model, temperature=0.7, seed=3)
    assert captures(engine) == 1


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("name", "keywords"), MODELS, ids=NAMES)
def test_weights_that_change_in_place_count_at_once(name: str, keywords: dict[str, Any], engine: TapeEngine) -> None:
    """No table of the step is computed from weights, or it is noticed."""
    model = build_model(name, keywords)
    first, weights = texts(model), {key: value.clone() for key, value in model.state_dict().items()}
    perturb(model, 0.5)
    assert_current(model)
    model.load_state_dict(weights)
    assert texts(model) == first
    assert captures(engine) == 1


def test_an_optimizer_step_between_two_texts(engine: TapeEngine) -> None:
    model = build_model("transformer-lm", {})
    before = texts(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    tokens = torch.randint(0, 29, (4, 12))
    model.train()
    (-model(tokens).logits.log_softmax(-1)[..., 3].mean()).backward()
    optimizer.step()
    model.eval()
    assert texts(model) != before
    assert_current(model)
    assert captures(engine) == 1


def test_a_table_of_earlier_weights_is_noticed(engine: TapeEngine) -> None:
    """The projected distances of Transformer-XL are computed anew for each text, and a graph reads the earlier ones."""
    model = build_model("compose", {"position": "xl"})
    assert_current(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, TransformerXLPosition):
                module.r_proj.weight.mul_(-8.0)
    assert_current(model)
    assert captures(engine) == 2


def replace_weights(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + torch.randn_like(parameter) / 2


def convert(model: Any) -> None:
    model.float()


def narrow_windows(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, SoftmaxKernel):
            module.mask = Causal() & Window(2)


def exchange_a_layer(model: Any) -> None:
    for index, layer in model.body.named_children():
        if index == "1":
            setattr(model.body, index, build_model("transformer-lm", {}).body.get_submodule(index))
            assert layer is not None


@pytest.mark.parametrize("change", [replace_weights, convert, narrow_windows, exchange_a_layer])
def test_other_weights_and_structures_are_captured_anew(change: Any, engine: TapeEngine) -> None:
    model = build_model("transformer-lm", {})
    texts(model)
    change(model)
    assert_current(model)
    assert captures(engine) == 2
    assert len(kept_steps._kept[model]) == 1


def test_other_sizes_are_captured_for_themselves_and_the_last_ones_are_kept(
    engine: TapeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_steps, "MAX_KEPT_STEPS", 3)
    model = build_model("gated-deltanet", {})
    for rows in (1, 2, 3):
        assert_current(model, PROMPTS[:rows])
    for rows in (3, 1, 2):
        assert_current(model, PROMPTS[:rows])
    assert captures(engine) == 3
    # the fourth takes the place of the one that was used before all others, that of three rows
    assert_current(model, [*PROMPTS, [1, 2]])
    assert_current(model, PROMPTS[:1])
    assert captures(engine) == 4
    assert_current(model, PROMPTS)
    assert captures(engine) == 5
    assert len(kept_steps._kept[model]) == 3


def test_kept_caches_have_a_limit_in_bytes(engine: TapeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("transformer-lm", {})
    texts(model, PROMPTS[:1])
    (kept,) = kept_steps._kept[model]
    # keys and values of two layers in float64
    assert 2 * 2 * 16 * 16 * 8 <= kept.cache_bytes <= 2 * 2 * 2 * 16 * 16 * 8
    monkeypatch.setattr(kept_steps, "MAX_KEPT_BYTES", int(2.5 * kept.cache_bytes))
    texts(model, PROMPTS[:2])
    assert [each.step.tokens.shape[0] for each in kept_steps._kept[model]] == [2]
    texts(model, PROMPTS)
    assert kept_steps._kept[model] == []


def test_growing_texts_keep_a_step_of_each_size(engine: TapeEngine) -> None:
    """The rings of windows are the same at every size: a kept step must not share them with one that is in use."""
    model = build_model("longformer-lm", {"window": 3, "top_window": 5, "dilated_heads": 1})
    assert_current(model, max_new=50)
    first = captures(engine)
    assert first == 3
    assert_current(model, [[1], [2, 2], [3, 3, 3, 3]], max_new=50)
    assert captures(engine) == first
    rings = [
        {tensor.untyped_storage().data_ptr() for tensor in tensors_of(each.step.state)}
        for each in kept_steps._kept[model]
    ]
    assert len(rings) == 3
    assert sum(map(len, rings)) == len(set.union(*rings))


def tensors_of(state: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def test_rows_that_end_early_and_beams(engine: TapeEngine) -> None:
    model = build_model("transformer-lm", {})
    stop = texts(model, max_new=4)[0][-1]
    for _ in range(2):
        assert_current(model, stop_ids=(stop,), max_new=14)
        assert_current(model, stop_ids=(stop,), beam=2, max_new=14)
    counted = captures(engine)
    assert_current(model, stop_ids=(stop,), max_new=14)
    assert captures(engine) == counted


def test_sources_of_an_encoder_decoder_are_copied(engine: TapeEngine) -> None:
    """A kept step reads a source of its own, so that no later call writes into what the caller has."""
    model = build_model("transformer", {})
    sources = [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert_current(model, sources)
    assert_current(model, [source[::-1] for source in sources])
    assert captures(engine) == 1
    assert_current(model, [[*source, 3] for source in sources])
    assert captures(engine) == 2


def test_texts_that_are_written_in_turn_do_not_share_a_step(engine: TapeEngine) -> None:
    """A step serves one text at a time; the second stream captures its own."""
    model = build_model("transformer-lm", {})
    texts(model, PROMPTS[:1])
    decoding = Decoding(max_new=9, stop_ids=(), step_path="static")
    streams = [stream(model, [prompt], decoding) for prompt in ([1, 2, 3], [7, 8, 9])]
    pieces: list[list[int]] = [[], []]
    for left, right in zip(*streams, strict=True):
        for tokens, piece in zip(pieces, (left, right)):
            tokens.append(piece.token)
    assert pieces == texts(model, [[1, 2, 3]], step_path="eager") + texts(model, [[7, 8, 9]], step_path="eager")
    assert captures(engine) == 2


def test_a_stream_that_is_left_keeps_its_step(engine: TapeEngine) -> None:
    model = build_model("transformer-lm", {})
    pieces: Any = stream(model, PROMPTS[:1], Decoding(max_new=9, stop_ids=(), step_path="static"))
    for _ in range(5):
        next(pieces)
    pieces.close()
    assert_current(model, PROMPTS[:1])
    assert captures(engine) == 1


def test_a_step_that_fails_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("transformer-lm", {})
    monkeypatch.setattr(TapeGraph, "replay", lambda graph: None)
    with pytest.raises(UserError, match="the captured step and the step itself give logits"):
        texts(model)
    assert model not in kept_steps._kept or not kept_steps._kept[model]


def test_kept_steps_do_not_hold_the_model_or_its_weights() -> None:
    model = build_model("transformer-lm", {})
    texts(model)
    assert len(kept_steps._kept[model]) == 1
    graphs = [weakref.ref(each.step._graph) for each in kept_steps._kept[model]]
    weight = weakref.ref(model.head.weight if hasattr(model.head, "weight") else next(model.parameters()))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert weight() is None
    assert [graph() for graph in graphs] == [None]


def test_steps_can_be_forgotten(engine: TapeEngine) -> None:
    model = build_model("transformer-lm", {})
    texts(model)
    assert forget_captured_steps(model) == 1
    assert forget_captured_steps(model) == 0
    assert_current(model)
    assert captures(engine) == 2


def test_other_settings_of_torch_are_captured_for_themselves(engine: TapeEngine) -> None:
    """A graph holds kernels that were selected for the settings of its capture."""
    model = build_model("transformer-lm", {})
    texts(model)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        texts(model)
        assert captures(engine) == 2
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    texts(model)
    assert captures(engine) == 2
