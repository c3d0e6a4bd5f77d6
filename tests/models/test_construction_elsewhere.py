"""Models that are built without memory, under another default dtype, or called with other weights than their own."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyformer.analysis.own_models import build_tiny, tiny_keywords
from manyformer.models import Model
from manyformer.recipes import build


def rows(model: Model) -> tuple[Tensor, ...]:
    tokens = torch.randint(1, 20, (2, 10), generator=torch.Generator().manual_seed(0))
    return (tokens, tokens) if hasattr(model, "embed_target") else (tokens,)


def fresh(recipe: str) -> Model:
    return build(recipe, **tiny_keywords(recipe)).eval()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("recipe", ["transformer", "alibi", "t5", "retnet", "lightning"])
def test_a_model_without_memory_is_complete_once_its_weights_are_loaded(recipe: str, assign: bool) -> None:
    model = build_tiny(recipe, {}, 0).eval()
    with torch.device("meta"):
        other = fresh(recipe)
    if not assign:
        other.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*other.parameters(), *other.buffers()):
                tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    other.load_state_dict(model.state_dict(), assign=assign)
    inputs = rows(model)
    assert torch.equal(other(*inputs).logits, model(*inputs).logits)


@pytest.mark.parametrize("recipe", ["transformer-lm", "bert", "mamba"])
def test_every_weight_has_the_default_dtype(recipe: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = fresh(recipe)
        assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
        assert model(*rows(model)).logits.isfinite().all()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("recipe", ["transformer", "t5", "transformer-xl", "linformer"])
def test_a_call_with_other_weights_leaves_the_model_its_own(recipe: str, is_wrapped: bool) -> None:
    model = build_tiny(recipe, {}, 0).eval()
    inputs = rows(model)
    before = model(*inputs).logits
    called: nn.Module = model
    if is_wrapped:
        called = Wrapped(model)
    zeros = {name: torch.zeros_like(weight) for name, weight in called.named_parameters()}
    functional_call(called, zeros, inputs)
    assert torch.equal(model(*inputs).logits, before)


class Wrapped(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(*inputs).logits
        return logits
