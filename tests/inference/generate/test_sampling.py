"""Greedy decoding and sampling: the right tokens, the right frequencies, whatever the cache and the company."""

import math
from typing import Any

import pytest
import torch
from writers import Pair, Recurrent, Table

import manyformer as mf
from manyformer.inference.generate import (
    BanTokensProcessor,
    Decoding,
    GreedyChoice,
    MinPProcessor,
    SampledChoice,
    TopPProcessor,
    generate,
    sampling,
)

PROMPTS = [[3, 4, 5], [7], [8, 9, 10, 11, 12, 13, 14], [6, 6]]
DRAWS = 20_000


def language_models(vocab: int = 40) -> list[Any]:
    torch.manual_seed(5)
    real = mf.build("transformer-lm", vocab=vocab, dim=32, depth=2, heads=2, max_length=40)
    with torch.no_grad():
        # fresh weights predict nearly evenly; these make choices
        real.head.weight.mul_(20)
    return [Recurrent(vocab).eval(), real.eval()]


def pairs(vocab: int = 40) -> list[Any]:
    torch.manual_seed(5)
    real = mf.build("transformer", vocab=vocab, dim=32, depth=2, heads=2)
    return [Pair(vocab).eval(), real.eval()]


def test_greedy_is_the_argmax_of_plain_calls() -> None:
    for model in language_models():
        for prompt in PROMPTS:
            row = list(prompt)
            with torch.no_grad():
                for _ in range(10):
                    row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
            assert generate(model, prompt, max_new=10).tokens == [row[len(prompt) :]]


def test_greedy_translation_is_the_argmax_of_plain_calls() -> None:
    for model in pairs():
        target = [1]
        with torch.no_grad():
            while len(target) < 12 and target[-1] != 2:
                logits = model(torch.tensor([[5, 6, 2]]), torch.tensor([target])).logits[0, -1]
                # padding and the beginning never come
                target.append(int(logits[2:].argmax()) + 2)
        expected = target[1:-1] if target[-1] == 2 else target[1:]
        assert generate(model, [[5, 6, 2]], max_new=11).tokens == [expected]


@pytest.mark.parametrize(
    "options", [{}, {"seed": 3}, {"seed": 1, "top_p": 0.9, "repetition_penalty": 1.3, "samples": 3}]
)
def test_neither_cache_nor_company_matters(options: dict[str, Any]) -> None:
    lengths = set()
    for model in [*language_models(), *pairs()]:
        stops: dict[str, Any] = {"max_new": 20, "stop_ids": tuple(range(2, 9)), **options}
        together = generate(model, PROMPTS, **stops)
        alone = [generate(model, [prompt], **stops).rows[0] for prompt in PROMPTS]
        assert list(together.rows) == alone
        assert generate(model, PROMPTS, use_cache=False, **stops).rows == together.rows
        assert generate(model, PROMPTS, batch=2, **stops).rows == together.rows
        lengths |= {len(answer.tokens) for row in together.rows for answer in row}
    # rows of different length, some of them gone before the others
    assert len(lengths) >= 4


def test_each_row_is_limited_by_its_own_length() -> None:
    _, model = language_models()
    for options in ({}, {"seed": 1}, {"beam": 2}):
        for use_cache in (None, False):
            actual = generate(model, PROMPTS, use_cache=use_cache, **options)
            assert [len(tokens) for tokens in actual.tokens] == [40 - len(prompt) for prompt in PROMPTS]
            assert {row[0].finish for row in actual.rows} == {"limit"}


@pytest.mark.parametrize("interval", [3, 16])
def test_looking_seldom_changes_nothing(interval: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # what is done on an accelerator, where reading back each token would cost time
    for model in [*language_models(), pairs()[0]]:
        for options in ({"max_new": 25, "stop_ids": (2, 3, 4)}, {"seed": 2, "stop_ids": (9,)}):
            expected = generate(model, PROMPTS, **options)
            search = sampling.StepwiseDecoder.__init__

            def seldom(self: Any, *arguments: Any, search: Any = search) -> None:
                search(self, *arguments)
                self.readback_interval = interval
                self.readback_column = self._next_readback_column()

            with monkeypatch.context() as patch:
                patch.setattr(sampling.StepwiseDecoder, "__init__", seldom)
                assert generate(model, PROMPTS, **options).rows == expected.rows


def test_an_end_token_ends_and_is_left_out() -> None:
    p = torch.eye(6).roll(1, 1) + 1e-9
    actual = generate(Table(p.log()), [[0], [3]], max_new=9, stop_ids=(4,))
    assert actual.tokens == [[1, 2, 3], []]
    assert [row[0].finish for row in actual.rows] == ["end", "end"]
    assert actual.stats.new_tokens == 5
    assert generate(Table(p.log()), [[0]], max_new=3).rows[0][0].finish == "limit"


def frequencies(shape: tuple[Any, ...], logits: torch.Tensor, seed: int) -> torch.Tensor:
    decoding = Decoding(choice=SampledChoice(seed, DRAWS), processors=shape, max_new=1)
    answers = generate(Table(logits.expand(len(logits), -1)), [[0]], decoding=decoding).rows[0]
    return torch.bincount(torch.tensor([answer.tokens[0] for answer in answers]), minlength=len(logits)) / DRAWS


@pytest.mark.parametrize("shape", [(), (TopPProcessor(0.8),), (MinPProcessor(0.2),), (BanTokensProcessor((1,)),)])
def test_frequencies_are_probabilities(shape: tuple[Any, ...]) -> None:
    logits = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.0, -9.0])
    shaped = logits[None]
    for one in shape:
        shaped = one(shaped, torch.zeros(1, 1, dtype=torch.long))
    expected = shaped[0].softmax(-1)
    actual = frequencies(shape, logits, 11)
    # five standard deviations of a binomial
    assert bool(((actual - expected).abs() <= 5 * (expected * (1 - expected) / DRAWS).sqrt() + 1e-9).all())


def test_draws_of_a_row_are_independent() -> None:
    # a fair coin thrown 2000 times in one row: halves, and no correlation from one throw to the next
    throws = torch.tensor(generate(Table(torch.zeros(2, 2)), [[0]], max_new=2000, seed=4).tokens[0]).double()
    assert abs(float(throws.mean()) - 0.5) < 5 * 0.5 / math.sqrt(2000)
    centred = throws - throws.mean()
    assert abs(float((centred[1:] * centred[:-1]).mean()) / 0.25) < 5 / math.sqrt(2000)


def test_seeds() -> None:
    model = Recurrent(40, sharp=0.5).eval()
    first = generate(model, PROMPTS, max_new=20, seed=1)
    assert generate(model, PROMPTS, max_new=20, seed=1) != generate(model, PROMPTS, max_new=20, seed=2)
    assert generate(model, PROMPTS, max_new=20, seed=1).rows == first.rows
    # copy j is what seed + j gives
    copies = generate(model, PROMPTS, max_new=20, seed=1, samples=3)
    assert [row[0] for row in copies.rows] == [row[0] for row in first.rows]
    assert [row[2] for row in copies.rows] == [row[0] for row in generate(model, PROMPTS, max_new=20, seed=3).rows]
    # without a seed every row has its own, and it is told
    fresh = generate(model, [[3], [3]], max_new=20, temperature=1.0)
    assert fresh.rows[0] != fresh.rows[1]
    assert generate(model, [[3]], max_new=20, seed=fresh.seeds[1]).rows[0] == fresh.rows[1]
    assert first.seeds == (1, 1, 1, 1)
    assert generate(model, [[3]], max_new=2).seeds == ()


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    generate(Recurrent(10).eval(), [[3]], max_new=5, seed=1)
    generate(Recurrent(10).eval(), [[3]], max_new=5, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_decoding_stops_where_no_token_can_be_chosen() -> None:
    with pytest.raises(ValueError, match="nothing to choose from for prompt 1 after 1 new tokens"):
        generate(Table(torch.zeros(3, 3)), [[0], [0, 2]], no_repeat_ngram=1, max_new=2, seed=1)
    broken = Table(torch.full((3, 3), math.nan))
    for options in ({}, {"seed": 1}):
        with pytest.raises(ValueError, match="logits are not finite"):
            generate(broken, [[0]], max_new=2, **options)


def test_statistics() -> None:
    model = mf.build("transformer-lm", vocab=20, dim=32, depth=3, heads=2, max_length=64).eval()
    found = generate(model, [[1, 2], [3, 4]], max_new=6).stats
    assert (found.prompts, found.prompt_tokens, found.new_tokens, found.cache) == (2, 4, 12, "with cache")
    keys_and_values = 2 * 3 * 2 * (2 + 6) * 32 * 4
    assert keys_and_values <= found.cache_bytes <= 1.5 * keys_and_values
    assert found.seconds > 0
    assert str(found).startswith(f"12 tokens in {found.seconds:.2f} s ({12 / found.seconds:.0f} tokens/s)")
    assert generate(model, [[1, 2]], max_new=6, use_cache=False).stats.cache == "without cache"


def test_a_model_that_cannot_stream_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from manyformer.recipes import RECIPES

    recipe = RECIPES["transformer-lm"]
    card = replace(recipe.card, reasons={**recipe.card.reasons, "incremental_decoding": "it looks both ways"})
    model = mf.build("transformer-lm", vocab=20, dim=32, depth=1, heads=2).eval()
    monkeypatch.setitem(RECIPES, "transformer-lm", replace(recipe, card=card))
    assert generate(model, [[1]], max_new=2).stats.cache == "without cache (it looks both ways)"
    with pytest.raises(ValueError, match=r"transformer-lm cannot use a cache \(it looks both ways\)"):
        generate(model, [[1]], max_new=2, use_cache=True)


@pytest.mark.parametrize("options", [{}, {"seed": 1, "top_p": 0.9}, {"beam": 2}])
def test_half_precision(options: dict[str, Any]) -> None:
    # the dtype of the cache follows the weights, that of the choice does not
    for model in (language_models()[1].bfloat16(), pairs()[1].bfloat16()):
        assert [len(row[0].tokens) for row in generate(model, PROMPTS, max_new=6, stop_ids=(), **options).rows] == [
            6
        ] * 4


def test_the_cheapest_objects_are_the_default() -> None:
    assert Decoding().choice == GreedyChoice()
