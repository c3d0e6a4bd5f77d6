"""A new mixer of some 30 lines, whose author has written no decoding, decodes right in every way that there is."""

import inspect
from collections.abc import Sequence

import pytest
import torch
from plain_mixer import FadingState, FadingSum, mixer_model

from manyformer.inference.generate import BeamSettings, Decoding, generate
from manyformer.models import LanguageModel
from manyformer.models.with_early_exit import early_exit
from perturbing import perturb

PROMPTS = [[5, 9, 3], [7, 4, 11, 8, 20, 6, 3, 17], [12]]
NEW = 9


@pytest.fixture
def model() -> LanguageModel:
    return perturb(mixer_model(), 0.5).double().eval()


def texts(
    model: LanguageModel, prompts: Sequence[Sequence[int]], *, use_cache: bool, width: int | None
) -> list[list[int]]:
    choice = {} if width is None else {"choice": BeamSettings(width)}
    decoding = Decoding(max_new=NEW, use_cache=use_cache, **choice)
    return generate(model, [list(prompt) for prompt in prompts], decoding=decoding).tokens


def test_its_author_writes_no_decoding() -> None:
    lines = [line for part in (FadingState, FadingSum) for line in inspect.getsource(part).splitlines()]
    assert len(lines) <= 60
    assert {name for name in vars(FadingSum) if not name.startswith("_")} == {"init_state", "forward"}


@pytest.mark.parametrize("width", [None, 3])
def test_a_batch_of_unlike_lengths_is_written_as_without_a_cache(model: LanguageModel, width: int | None) -> None:
    cached = texts(model, PROMPTS, use_cache=True, width=width)
    assert cached == texts(model, PROMPTS, use_cache=False, width=width)
    assert len({tuple(text[-NEW:]) for text in cached}) == len(PROMPTS)


@pytest.mark.parametrize("width", [None, 3])
def test_padding_on_the_left_changes_no_text(model: LanguageModel, width: int | None) -> None:
    together = texts(model, PROMPTS, use_cache=True, width=width)
    assert together == [texts(model, [prompt], use_cache=True, width=width)[0] for prompt in PROMPTS]


def test_bound_steps_give_the_logits_of_one_pass(model: LanguageModel) -> None:
    tokens = torch.randint(0, 29, (3, 12))
    with torch.inference_mode():
        next_token, state = model.next_token(), model(tokens[:, :4], None, model.init_state(3)).state
        logits = []
        for token in tokens[:, 4:].split(1, 1):
            step_logits, state = next_token(token, state, None)
            logits.append(step_logits)
        torch.testing.assert_close(torch.cat(logits, 1), model(tokens).logits[:, 4:], atol=1e-12, rtol=0)


def test_hooks_inside_it_are_called_at_every_step(model: LanguageModel) -> None:
    calls: list[int] = []
    for layer in (part for part in model.modules() if isinstance(part, FadingSum)):
        layer.value.register_forward_hook(lambda module, inputs, output: calls.append(output.shape[1]))
    with torch.inference_mode():
        next_token, state = model.next_token(), model(torch.tensor([PROMPTS[0]]), None, model.init_state(1)).state
        calls.clear()
        for token in (3, 8, 1):
            _, state = next_token(torch.tensor([[token]]), state, None)
    assert calls == [1] * 6


def test_a_forward_given_to_one_of_its_parts_is_the_one_that_decodes(model: LanguageModel) -> None:
    expected = texts(model, PROMPTS, use_cache=True, width=None)
    layer = next(part for part in model.modules() if isinstance(part, FadingSum))
    forward = layer.out.forward
    layer.out.forward = lambda x: -forward(x)  # type: ignore[method-assign]
    changed = texts(model, PROMPTS, use_cache=True, width=None)
    assert changed == texts(model, PROMPTS, use_cache=False, width=None)
    assert changed != expected


def test_weights_that_change_in_place_are_those_of_the_next_step(model: LanguageModel) -> None:
    tokens = torch.tensor([PROMPTS[1]])
    next_token, state = model.next_token(), model.init_state(1)
    layer = next(part for part in model.modules() if isinstance(part, FadingSum))
    with torch.no_grad():
        layer.out.weight.mul_(-2)
        for token in tokens.split(1, 1):
            logits, state = next_token(token, state, None)
        torch.testing.assert_close(logits, model(tokens).logits[:, -1:], atol=1e-12, rtol=0)


def test_static_steps_write_the_same_text(model: LanguageModel) -> None:
    eager, static = (
        generate(model, PROMPTS, decoding=Decoding(max_new=NEW, step_path=path)) for path in ("eager", "static")
    )
    assert eager.tokens == static.tokens


@pytest.mark.parametrize("threshold", [0.2, 0.1])
def test_tokens_may_exit_early(model: LanguageModel, threshold: float) -> None:
    exiting = early_exit(model, threshold=threshold).double().eval()
    cached, full = (texts(exiting, PROMPTS, use_cache=use_cache, width=None) for use_cache in (True, False))
    assert cached == full
