"""One-token steps: the outputs and states of `forward`, whatever the model is made of."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.inference.generate.next_token import bind_next_token, storage_bytes
from manyformer.nn import Attention, Kernel
from manyformer.nn.core import PADDING_SEGMENT, LayerOutput, tree_map
from manyformer.nn.runtime.costs import count_flops
from perturbing import perturb

RECURRENT = ("deltanet", "gated-deltanet", "kda", "gla", "retnet", "lightning", "hgrn2", "mamba-2", "mlstm")
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
    ("alibi", {}),
    ("compose", {"position": "alibi", "kv_heads": 2}),
    ("compose", {"position": "t5"}),
    ("compose", {"position": "kerple"}),
    ("linear-transformer", {}),
    ("linear-transformer", {"update_rule": "delta"}),
    ("performer", {"features": 12}),
    ("performer", {"features": 12, "feature_kernel": "relu"}),
    ("rfa", {"features": 8}),
    ("rfa", {"features": 8, "update_rule": "sum"}),
    ("longformer-lm", {"window": 3, "top_window": 5, "dilated_heads": 1}),
    ("sparse-transformer", {"pattern": "fixed", "stride": 4, "summary": 1, "max_length": 16}),
    ("llama", {"output_gate": True, "kv_heads": 2}),
    ("qwen3-next", {"pattern": "LF", "delta_heads": 4, "delta_key_heads": 2, "expert_dim": 8, "shared_expert_dim": 8}),
    *((name, {}) for name in RECURRENT),
]


def build_model(name: str, keywords: dict[str, Any]) -> Any:
    model: Any = mf.build(name, **SMALL, **keywords)
    perturb(model, 0.2)
    return model.double().eval()


def decode_both(model: Any, init: Any, tokens: Tensor, memory: Any = None) -> tuple[Tensor, Tensor]:
    """The logits of single tokens, by steps and by `forward`; states are compared after every token."""
    next_token, state, forward_state = bind_next_token(model), init(), init()
    actual, expected = [], []
    for token in tokens.split(1, dim=1):
        logits, state = next_token(token, state, memory)
        out = model(token, state=forward_state) if memory is None else model.decode(token, memory, state=forward_state)
        forward_state = out.state
        actual.append(logits)
        expected.append(out.logits)
        assert equal_states(state, forward_state)
    return torch.cat(actual, 1), torch.cat(expected, 1)


def equal_states(left: Any, right: Any) -> bool:
    """Whether two states are equal: structure and numbers exactly, tensors up to the rounding of float64."""
    tensors: list[list[Tensor]] = [[], []]
    shapes = [
        tree_map(lambda t, kept=kept: kept.append(t) or torch.zeros(0), s) for kept, s in zip(tensors, (left, right))
    ]
    return str(shapes[0]) == str(shapes[1]) and all(
        a.shape == b.shape and torch.allclose(a, b, atol=1e-12, rtol=0) for a, b in zip(*tensors, strict=True)
    )


@pytest.mark.parametrize("capacity", [12, None])
@pytest.mark.parametrize(("name", "keywords"), MODELS, ids=[f"{n} {w}" for n, w in MODELS])
def test_steps_equal_forward(name: str, keywords: dict[str, Any], capacity: int | None) -> None:
    model, prompt = build_model(name, keywords), torch.randint(0, 29, (3, 5))
    with torch.inference_mode():

        def init() -> Any:
            return model(prompt, state=model.init_state(3, capacity=capacity)).state

        actual, expected = decode_both(model, init, torch.randint(0, 29, (3, 7)))
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["gated-deltanet", "mamba-2"])
def test_a_prompt_may_be_shorter_than_a_convolution(name: str) -> None:
    """The tokens before the document, which the convolution of the first ones reads, are zeros."""
    model, prompt = build_model(name, {}), torch.randint(0, 29, (3, 1))
    with torch.inference_mode():
        actual, expected = decode_both(
            model, lambda: model(prompt, state=model.init_state(3)).state, torch.randint(0, 29, (3, 7))
        )
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["transformer-lm", "linear-transformer", "transformer-xl"])
def test_a_prompt_needs_the_logits_of_its_last_token_alone(name: str) -> None:
    model, prompt = build_model(name, {}), torch.randint(0, 29, (3, 5))
    with torch.inference_mode():
        last, full = (read(prompt, None, model.init_state(3)) for read in (model.last_logits, model))
        seen: list[int] = []
        model.head.register_forward_hook(lambda head, inputs, output: seen.append(inputs[0].shape[1]))
        mf.generate(model, prompt[0], max_new=2)
    torch.testing.assert_close(last.logits, full.logits[:, -1:], atol=1e-12, rtol=0)
    assert equal_states(last.state, full.state)
    assert set(seen) == {1}


@pytest.mark.parametrize("side", ["left", "right"])
def test_after_padding(side: str) -> None:
    """Rows of different lengths need masks, which `forward` applies."""
    model, prompt = build_model("transformer-lm", {}), torch.randint(0, 29, (2, 5))
    segments = torch.tensor([[0] * 5, [0] * 3 + [PADDING_SEGMENT] * 2])
    segments = segments.flip(1) if side == "left" else segments
    with torch.inference_mode():
        actual, expected = decode_both(
            model, lambda: model(prompt, segments, model.init_state(2, capacity=9)).state, torch.randint(0, 29, (2, 4))
        )
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("position", ["alibi", "t5", "kerple"])
def test_biases_of_distances_beyond_the_first_table(position: str) -> None:
    model, prompt = build_model("compose", {"position": position}), torch.randint(0, 29, (1, 3))
    with torch.inference_mode():
        actual, expected = decode_both(
            model, lambda: model(prompt, state=model.init_state(1)).state, torch.randint(0, 29, (1, 12))
        )
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_cross_attention(norm: str) -> None:
    model = build_model("transformer", {"norm_order": norm})
    source = torch.randint(0, 29, (2, 6))
    for segments in (None, torch.tensor([[0] * 6, [0] * 4 + [PADDING_SEGMENT] * 2])):
        with torch.inference_mode():
            memory = model.encode(source, segments)
            actual, expected = decode_both(
                model, lambda: model.init_state(2, capacity=8), torch.randint(0, 29, (2, 8)), memory
            )
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


def test_rows_can_be_reordered() -> None:
    model, tokens = build_model("transformer-lm", {}), torch.randint(0, 29, (3, 6))
    order = torch.tensor([2, 0, 2])
    with torch.inference_mode():
        next_token, state = bind_next_token(model), model.init_state(3, capacity=6)
        for token in tokens[:, :4].split(1, dim=1):
            _, state = next_token(token, state, None)
        state = tree_map(lambda t: t.index_select(0, order), state)
        mixed = torch.cat([tokens[order, :4], tokens[:, 4:]], dim=1)
        logits = [next_token(token, state, None) for token in tokens[:, 4:5].split(1, dim=1)]
        torch.testing.assert_close(logits[0][0], model(mixed[:, :5]).logits[:, -1:], atol=1e-5, rtol=0)


def test_a_full_cache_is_an_error() -> None:
    model = build_model("transformer-lm", {})
    with torch.inference_mode():
        state = model(torch.zeros(1, 4, dtype=torch.long), state=model.init_state(1, capacity=4)).state
        with pytest.raises(ValueError, match="capacity=4, but 5 tokens"):
            bind_next_token(model)(torch.zeros(1, 1, dtype=torch.long), state, None)


def modules_called(model: Any, kind: type[nn.Module]) -> int:
    """The number of modules of a type that are called as modules for one token."""
    calls: list[Any] = []
    real = kind.__call__
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        state = model(torch.zeros(1, 3, dtype=torch.long), state=model.init_state(1, capacity=9)).state
        next_token = bind_next_token(model)
        patch.setattr(kind, "__call__", lambda self, *a, **k: (calls.append(self), real(self, *a, **k))[1])
        next_token(torch.zeros(1, 1, dtype=torch.long), state, None)
    return len(calls)


BOUND_MODELS: list[tuple[str, dict[str, Any]]] = [
    ("transformer-lm", {}),
    ("compose", {"position": "rope"}),
    ("performer", {"features": 8}),
    ("rfa", {}),
    *((name, {}) for name in RECURRENT),
]


@pytest.mark.parametrize(("name", "keywords"), BOUND_MODELS, ids=[name for name, _ in BOUND_MODELS])
def test_no_module_is_called(name: str, keywords: dict[str, Any]) -> None:
    model = build_model(name, keywords)
    for kind in (nn.Linear, nn.LayerNorm, Attention, Kernel):
        assert modules_called(model, kind) == 0


def test_cost_does_not_depend_on_the_position() -> None:
    """State size and operations of a token do not depend on the number of previous tokens."""
    model = build_model("performer", {"features": 8})
    actual = []
    with torch.inference_mode():
        for length in (4, 40):
            next_token, state = (
                bind_next_token(model),
                model(torch.zeros(2, length, dtype=torch.long), state=model.init_state(2)).state,
            )
            flops = count_flops(lambda f=next_token, s=state: f(torch.zeros(2, 1, dtype=torch.long), s, None))
            actual.append((storage_bytes(state), flops))
    assert actual[0] == actual[1]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_hooks_and_subclasses_take_part() -> None:
    """A module with a hook, or of a subclass, is called as a module."""
    tokens, token = torch.randint(0, 29, (1, 3)), torch.randint(0, 29, (1, 1))
    plain, changed = build_model("transformer-lm", {}), build_model("transformer-lm", {})
    changed.load_state_dict(plain.state_dict())
    ff = changed.body.get_submodule("0").ff.inner
    double = Doubled(ff.up.in_features, ff.up.out_features).double().eval()
    double.load_state_dict(ff.up.state_dict())
    ff.up = double
    layer = changed.body.get_submodule("1")
    tensors: list[Any] = []
    layer.attention.inner.q_proj.register_forward_hook(lambda *call: tensors.append(call))
    layer.register_forward_hook(lambda module, _, out: LayerOutput(out.y + 1, out.state, out.loss))
    with torch.inference_mode():
        state = changed(tokens, state=changed.init_state(1, capacity=4)).state
        tensors.clear()
        logits, _ = bind_next_token(changed)(token, state, None)
        assert len(tensors) == 1
        torch.testing.assert_close(logits, changed(torch.cat([tokens, token], 1)).logits[:, -1:], atol=1e-5, rtol=0)
        assert (logits - plain(torch.cat([tokens, token], 1)).logits[:, -1:]).abs().max() > 0.1


def test_models_without_a_step_of_their_own_are_called() -> None:
    class Echo:
        vocab, max_length = 5, None

        def init_state(self, batch: int, *, capacity: int | None = None) -> Any:
            return 0

        def __call__(self, tokens: Tensor, segments: Any = None, state: Any = None) -> Any:
            from manyformer.models import ModelOutput

            return ModelOutput(torch.nn.functional.one_hot(tokens, 5).float(), state + 1)

    logits, state = bind_next_token(Echo())(torch.tensor([[3]]), 4, None)  # type: ignore[arg-type]
    assert logits.argmax() == 3
    assert state == 5


def test_training_models_keep_their_dropout() -> None:
    model = build_model("transformer-lm", {"dropout": 0.5}).train()
    with torch.inference_mode():
        next_token, token = bind_next_token(model), torch.ones(1, 1, dtype=torch.long)
        first, second = (next_token(token, model.init_state(1, capacity=2), None)[0] for _ in range(2))
    assert not torch.equal(first, second)


REPORTED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("transformer-lm", {}, []),
    ("rfa", {}, []),
    *((name, {}, []) for name in RECURRENT),
    ("alibi", {}, []),
    ("compose", {"position": "fire"}, []),
    ("mixtral", {}, ["body.0.ff.inner", "body.1.ff.inner"]),
]


@pytest.mark.parametrize(("name", "keywords", "expected"), REPORTED, ids=[name for name, *_ in REPORTED])
def test_layers_without_a_step_are_reported(name: str, keywords: dict[str, Any], expected: list[str]) -> None:
    assert list(mf.explain(build_model(name, keywords))) == expected


def test_layers_with_hooks_are_reported() -> None:
    model = build_model("transformer-lm", {})
    model.body.get_submodule("1.ff").register_forward_hook(lambda *call: None)
    assert model.layers_without_step() == ["body.1.ff"]


def test_classes_of_parametrized_modules_are_forgotten_with_them() -> None:
    """A parametrization makes a class for each module; what binds models must not keep all that it ever met."""
    model = build_model("transformer-lm", {})
    ff = model.decoder_stack.get_submodule("0.ff.inner")
    nn.utils.parametrizations.weight_norm(ff.up)
    kind = weakref.ref(type(ff.up))
    model.next_token()
    assert kind() is not None
    del model, ff
    # first the class that was made for the step, then the one that it was made of
    gc.collect()
    gc.collect()
    assert kind() is None
