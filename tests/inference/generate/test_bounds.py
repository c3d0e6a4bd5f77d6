"""The largest values of the options of decoding, and what is said where memory does not suffice."""

import pytest
import torch

import manyformer as mf
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.inference.generate import decoding_from_options
from manyformer.nn.runtime.devices import OutOfMemory


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 1_000_000}, "beam must be at most 1,024, got 1,000,000"),
        ({"beam": 4, "best": 10**9}, "best must be at most 1,024"),
        ({"samples": 10**9}, "samples must be at most 100,000"),
        ({"max_new": 10**9}, "max_new must be at most 1,000,000"),
        ({"seed": 10**23}, "seed must be at most 9,223,372,036,854,775,807"),
    ],
)
def test_options_have_largest_values(options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        decoding_from_options(**options)  # type: ignore[arg-type]


def test_decoding_that_does_not_fit_says_what_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny("transformer-lm", {}, 0)

    def fail(*args: object, **options: object) -> None:
        torch.empty(1 << 55)

    monkeypatch.setattr(model, "init_state", fail)
    sentence = r"out of memory in the decoding of 2 prompts with 3 sequences each, of up to 5 new tokens \(.* at once\)"
    with pytest.raises(OutOfMemory, match=f"{sentence}; make the beam, the samples, the batch or max_new smaller"):
        mf.generate(model, [[5, 6], [7]], max_new=5, samples=3, seed=1)


def test_cropped_prompts_continue_as_their_last_tokens() -> None:
    torch.manual_seed(0)
    model = mf.build("compose", vocab=20, dim=16, depth=1, heads=2, position="learned", max_length=12).eval()
    prompt = [*range(3, 20), *range(3, 9)]
    with pytest.raises(UserError, match=r"prompt 0 has 23 tokens.* leave out its beginning with crop"):
        mf.generate(model, prompt, max_new=4)
    cropped = mf.generate(model, [prompt, [5, 6]], max_new=4, crop=True).tokens
    assert cropped == mf.generate(model, [prompt[-8:], [5, 6]], max_new=4).tokens
    assert len(mf.generate(model, prompt, crop=True, stop_ids=()).tokens[0]) == 6  # half of the max_length
    with pytest.raises(UserError, match="the model allows 12 tokens with the prompt"):
        mf.generate(model, prompt, max_new=12, crop=True)
    translator = build_tiny("transformer", {}, 0)
    with pytest.raises(UserError, match="a translation needs its whole source"):
        mf.generate(translator, [5, 6], crop=True)
