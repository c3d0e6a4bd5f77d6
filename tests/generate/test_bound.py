"""One token at a time by bound functions: the same numbers as the model's own, whatever the model is made of."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.attention import Attention
from manyformer.core import PADDING_SEGMENT, LayerOutput, tree_map
from manyformer.flops import count_flops
from manyformer.generate import bound
from manyformer.generate.bound import bind
from manyformer.generate.next_token import state_bytes
from manyformer.kernels import Kernel

SMALL = {"vocab": 29, "dim": 16, "depth": 2, "heads": 4}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("transformer-lm", {}),
    ("transformer-lm", {"norm_order": "post"}),
    ("transformer-lm", {"norm_order": "sandwich"}),
    ("transformer-lm", {"dropout": 0.3}),
    ("compose", {"kv_heads": 2, "feedforward": "swiglu", "norm_kind": "rms"}),
    ("compose", {"position": "none", "feedforward": "relu"}),
    ("compose", {"position": "learned", "feedforward": "geglu"}),
    ("compose", {"position": "rope", "kv_heads": 2}),
    ("compose", {"position": "rope-yarn", "max_length": 4}),
    ("compose", {"position": "rope-dynamic", "max_length": 8}),
    ("linear-transformer", {}),
    ("linear-transformer", {"update_rule": "delta"}),
    ("performer", {"features": 12}),
    ("performer", {"features": 12, "feature_kernel": "relu"}),
    ("rfa", {"features": 8}),
    ("rfa", {"features": 8, "update_rule": "sum"}),
    ("longformer-lm", {"window": 3, "top_window": 5, "dilated_heads": 1}),
    ("sparse-transformer", {"pattern": "fixed", "stride": 4, "summary": 1, "max_length": 16}),
]


def built(name: str, words: dict[str, Any]) -> Any:
    model: Any = mf.build(name, **SMALL, **words)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.2)
    return model.double().eval()


def both(model: Any, start: Any, tokens: Tensor, memory: Any = None) -> tuple[Tensor, Tensor]:
    """Logits of all tokens, one after the other: bound, and by the model itself. States are compared on the way."""
    following, mine, own = bind(model), start(), start()
    found, expected = [], []
    for token in tokens.split(1, dim=1):
        logits, mine = following(token, mine, memory)
        out = model(token, state=own) if memory is None else model.decode(token, memory, state=own)
        own = out.state
        found.append(logits)
        expected.append(out.logits)
        assert same(mine, own)
    return torch.cat(found, 1), torch.cat(expected, 1)


def same(left: Any, right: Any) -> bool:
    """Whether two states are equal: structure and numbers, and tensors but for the rounding of float64."""
    seen: list[list[Tensor]] = [[], []]
    shapes = [
        tree_map(lambda t, kept=kept: kept.append(t) or torch.zeros(0), s) for kept, s in zip(seen, (left, right))
    ]
    return str(shapes[0]) == str(shapes[1]) and all(
        a.shape == b.shape and torch.allclose(a, b, atol=1e-12, rtol=0) for a, b in zip(*seen, strict=True)
    )


@pytest.mark.parametrize("capacity", [12, None])
@pytest.mark.parametrize(("name", "words"), MODELS, ids=[f"{n} {w}" for n, w in MODELS])
def test_numbers_are_those_of_the_model_itself(name: str, words: dict[str, Any], capacity: int | None) -> None:
    model, prompt = built(name, words), torch.randint(0, 29, (3, 5))
    with torch.inference_mode():

        def start() -> Any:
            return model(prompt, state=model.init_state(3, capacity=capacity)).state

        found, expected = both(model, start, torch.randint(0, 29, (3, 7)))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_after_padding(side: str) -> None:
    """Rows of different lengths need masks: the layers themselves see to it."""
    model, prompt = built("transformer-lm", {}), torch.randint(0, 29, (2, 5))
    segments = torch.tensor([[0] * 5, [0] * 3 + [PADDING_SEGMENT] * 2])
    segments = segments.flip(1) if side == "left" else segments
    with torch.inference_mode():
        found, expected = both(
            model, lambda: model(prompt, segments, model.init_state(2, capacity=9)).state, torch.randint(0, 29, (2, 4))
        )
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_decoder_with_its_source(norm: str) -> None:
    model = built("transformer", {"norm_order": norm})
    source = torch.randint(0, 29, (2, 6))
    for segments in (None, torch.tensor([[0] * 6, [0] * 4 + [PADDING_SEGMENT] * 2])):
        with torch.inference_mode():
            memory = model.encode(source, segments)
            found, expected = both(model, lambda: model.init_state(2, capacity=8), torch.randint(0, 29, (2, 8)), memory)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_rows_can_be_exchanged_on_the_way() -> None:
    model, tokens = built("transformer-lm", {}), torch.randint(0, 29, (3, 6))
    order = torch.tensor([2, 0, 2])
    with torch.inference_mode():
        following, state = bind(model), model.init_state(3, capacity=6)
        for token in tokens[:, :4].split(1, dim=1):
            _, state = following(token, state, None)
        state = tree_map(lambda t: t.index_select(0, order), state)
        mixed = torch.cat([tokens[order, :4], tokens[:, 4:]], dim=1)
        logits = [following(token, state, None) for token in tokens[:, 4:5].split(1, dim=1)]
        torch.testing.assert_close(logits[0][0], model(mixed[:, :5]).logits[:, -1:], atol=1e-5, rtol=0)


def test_a_full_cache_still_says_so() -> None:
    model = built("transformer-lm", {})
    with torch.inference_mode():
        state = model(torch.zeros(1, 4, dtype=torch.long), state=model.init_state(1, capacity=4)).state
        with pytest.raises(ValueError, match="created with capacity=4, but 5 tokens need space"):
            bind(model)(torch.zeros(1, 1, dtype=torch.long), state, None)


def modules_called(model: Any, kind: type[nn.Module]) -> int:
    """How many modules of a type are still called as modules for one token."""
    calls: list[Any] = []
    real = kind.__call__
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        state = model(torch.zeros(1, 3, dtype=torch.long), state=model.init_state(1, capacity=9)).state
        following = bind(model)
        patch.setattr(kind, "__call__", lambda self, *a, **k: (calls.append(self), real(self, *a, **k))[1])
        following(torch.zeros(1, 1, dtype=torch.long), state, None)
    return len(calls)


UNCALLED = [("transformer-lm", {}), ("compose", {"position": "rope"}), ("performer", {"features": 8}), ("rfa", {})]


@pytest.mark.parametrize(("name", "words"), UNCALLED, ids=[name for name, _ in UNCALLED])
def test_nothing_is_called_that_need_not_be(name: str, words: dict[str, Any]) -> None:
    model = built(name, words)
    for kind in (nn.Linear, nn.LayerNorm, Attention, Kernel):
        assert modules_called(model, kind) == 0


def test_a_memory_is_as_large_and_as_quick_later() -> None:
    """State and operations of a token do not depend on how many came before."""
    model = built("performer", {"features": 8})
    found = []
    with torch.inference_mode():
        for length in (4, 40):
            following, state = (
                bind(model),
                model(torch.zeros(2, length, dtype=torch.long), state=model.init_state(2)).state,
            )
            flops = count_flops(lambda f=following, s=state: f(torch.zeros(2, 1, dtype=torch.long), s, None))
            found.append((state_bytes(state), flops))
    assert found[0] == found[1]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_what_has_been_changed_is_called_as_it_is() -> None:
    """Hooks, subclasses and layers that nobody has heard of take part."""
    tokens, token = torch.randint(0, 29, (1, 3)), torch.randint(0, 29, (1, 1))
    plain, changed = built("transformer-lm", {}), built("transformer-lm", {})
    changed.load_state_dict(plain.state_dict())
    ff = changed.body.get_submodule("0").ff.inner
    double = Doubled(ff.up.in_features, ff.up.out_features).double().eval()
    double.load_state_dict(ff.up.state_dict())
    ff.up = double
    layer = changed.body.get_submodule("1")
    seen: list[Any] = []
    layer.attention.inner.q_proj.register_forward_hook(lambda *call: seen.append(call))
    layer.register_forward_hook(lambda module, _, out: LayerOutput(out.y + 1, out.state, out.loss))
    with torch.inference_mode():
        state = changed(tokens, state=changed.start(1, capacity=4)).state
        seen.clear()
        logits, _ = bind(changed)(token, state, None)
        assert len(seen) == 1
        torch.testing.assert_close(logits, changed(torch.cat([tokens, token], 1)).logits[:, -1:], atol=1e-5, rtol=0)
        assert (logits - plain(torch.cat([tokens, token], 1)).logits[:, -1:]).abs().max() > 0.1


def test_other_peoples_models_are_called_as_they_are() -> None:
    class Echo:
        vocab, max_length = 5, None

        def init_state(self, batch: int, *, capacity: int | None = None) -> Any:
            return 0

        def __call__(self, tokens: Tensor, segments: Any = None, state: Any = None) -> Any:
            from manyformer.models import ModelOutput

            return ModelOutput(torch.nn.functional.one_hot(tokens, 5).float(), state + 1)

    logits, state = bind(Echo())(torch.tensor([[3]]), 4, None)  # type: ignore[arg-type]
    assert logits.argmax() == 3
    assert state == 5


def test_training_models_keep_their_dropout() -> None:
    model = built("transformer-lm", {"dropout": 0.5}).train()
    with torch.inference_mode():
        following, token = bind(model), torch.ones(1, 1, dtype=torch.long)
        first, second = (following(token, model.init_state(1, capacity=2), None)[0] for _ in range(2))
    assert not torch.equal(first, second)


def test_all_that_is_known_is_a_layer() -> None:
    from manyformer.core import Layer

    assert all(issubclass(kind, Layer) for kind in bound.KNOWN)
