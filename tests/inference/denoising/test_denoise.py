"""`denoise`: prompts stay, gaps are filled, rows do not depend on each other, and what cannot be is refused."""

from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.data.tokenizers.native_tokenizers import ByteTokenizer
from manyformer.inference.denoising import FilledText, denoise
from manyformer.inference.denoising.denoise import read_text
from manyformer.models import Model
from manyformer.recipes import build

VOCAB = 261
MASK = 4
EOS = 2


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return build("mdlm", vocab=VOCAB, dim=16, depth=1, heads=2, dropout=0.0).double()


@pytest.fixture(scope="module")
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


def test_what_is_given_stays_and_gaps_are_filled(model: Model, tokenizer: ByteTokenizer) -> None:
    result = denoise(model, "a cat __ a mat", gap="_", tokenizer=tokenizer, seed=1, samples=3)
    assert len(result.rows[0]) == 3
    for filled in result.rows[0]:
        assert filled.tokens[:6] == tokenizer.encode("a cat ")
        assert filled.tokens[8:] == tokenizer.encode(" a mat")
        # nothing ends a text within it, and no special token stands for a letter
        assert min(filled.tokens) > MASK
    assert len({filled.text for filled in result.rows[0]}) > 1
    assert result.filled == 6


def test_a_prompt_is_continued_as_far_as_asked_and_ends_at_an_end(model: Model, tokenizer: ByteTokenizer) -> None:
    result = mf.denoise(model, ["ab", "c"], tokenizer=tokenizer, max_new=30, seed=2, steps=4)
    assert [text[:1] for text in result.texts] == ["a", "c"]
    assert all(EOS not in tokens for tokens in result.tokens)
    ended = read_text([1, 70, EOS, 71], [1, MASK, MASK, MASK], tokenizer, seed=0)
    assert ended == FilledText([70], tokenizer.decode([70]), 0)
    ids = denoise(model, [[1, 7]], max_new=20, seed=2).tokens[0]
    assert ids[:2] == [1, 7]
    assert len(ids) == 22


@pytest.mark.parametrize("sampler", ["ancestral", "first-hitting", "low-confidence"])
def test_a_row_does_not_depend_on_others(model: Model, sampler: Any) -> None:
    rows = [[1, 9], [1, 8, 7, 6, 5, 10], [1]]
    options: dict[str, Any] = {"max_new": 9, "sampler": sampler, "block": 4, "seed": 3}
    together = denoise(model, rows, **options)
    assert [denoise(model, [row], **options).tokens[0] for row in rows] == together.tokens
    assert denoise(model, rows, batch=1, **options).tokens == together.tokens


def test_steps_bound_the_calls_of_the_model(model: Model) -> None:
    for sampler in ("ancestral", "low-confidence"):
        assert denoise(model, [1], max_new=32, steps=4, sampler=sampler, seed=0).calls <= 4
    assert denoise(model, [1], max_new=32, steps=8, block=8, sampler="low-confidence", seed=0).calls == 8
    assert denoise(model, [1], max_new=12, sampler="first-hitting", seed=0).calls == 12


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("a", {"gap": "_"}, "prompt 0 has no gap '_'; leave gap out to continue it"),
    ([1, 5], {"gap": "_"}, "in token ids a gap is the mask token 4"),
    ("a", {"sampler": "greedy"}, "sampler must be one of ancestral, first-hitting, low-confidence, got 'greedy'"),
    ("a", {"sampler": "first-hitting", "steps": 3}, r"steps \(3\) is for other samplers"),
    ("a", {"use_cache": True}, "use_cache is for a model of blocks, such as bd3-lm"),
    ("a", {"top_k": 3}, "denoise has no option top_k; it has max_new"),
    ("a", {"steps": 0}, "steps must be at least 1, got 0"),
    ("a", {"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
    ([300], {}, "prompt 0 has token 300, but the model's tokens are 0 to 260"),
]


@pytest.mark.parametrize(("prompt", "options", "message"), REFUSED)
def test_options_that_contradict_are_refused(
    model: Model, tokenizer: ByteTokenizer, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        denoise(model, prompt, tokenizer=tokenizer, **options)


def test_other_models_and_other_verbs_are_refused(model: Model) -> None:
    causal = build("transformer-lm", vocab=20, dim=8, depth=1, heads=1)
    with pytest.raises(UserError, match=r"a LanguageModel fills no hidden tokens.*mf.generate is for language models"):
        denoise(causal, [1])
    with pytest.raises(UserError, match=r"a MaskedDiffusionLM does not generate text.*mf.denoise fills its hidden"):
        mf.generate(model, [1])  # type: ignore[arg-type]
