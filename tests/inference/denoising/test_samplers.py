"""What samplers of a masked diffusion draw: exact distributions of a table, and the most probable tokens first."""

import math
from collections import Counter
from itertools import permutations, product

import pytest
import torch
from tabular_diffusion import MASK, TabularDiffusion
from torch import Tensor

from manyformer.inference.denoising.filling import Canvas, Filling
from manyformer.inference.denoising.samplers import SAMPLERS, AncestralSampler, LowConfidenceSampler, SamplingStep

VOCAB = 3
ROWS = 4000


def canvas_of(rows: list[list[int]]) -> Canvas:
    tokens = torch.tensor(rows)
    none = torch.zeros(VOCAB, dtype=torch.bool)
    return Canvas(tokens, None, range(len(rows)), none, (), torch.full((len(rows), 1), -1))


def drawn(model: TabularDiffusion, filling: Filling, row: list[int]) -> Counter[tuple[int, ...]]:
    with torch.inference_mode():
        return Counter(map(tuple, filling.fill(model, canvas_of([row] * ROWS)).tolist()))


def chi_square(counts: Counter[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]) -> float:
    assert sum(probabilities.values()) == pytest.approx(1)
    assert counts.keys() <= probabilities.keys()
    return sum((counts[text] - ROWS * p) ** 2 / (ROWS * p) for text, p in probabilities.items())


def in_random_order(model: TabularDiffusion) -> dict[tuple[int, ...], float]:
    """The probability of each text, as the mean over the orders in which its tokens may become visible."""
    texts = product(range(1, VOCAB), repeat=3)
    orders = list(permutations(range(3)))
    return {
        text: sum(
            math.exp(-sum(model.nats(text, order[n:])[place] for n, place in enumerate(order))) for order in orders
        )
        / len(orders)
        for text in texts
    }


QUANTILE = 24.32
"""The 99.9 % quantile of chi-square with 7 degrees of freedom: there are 8 texts of two tokens at three places."""


@pytest.fixture(scope="module")
def table() -> TabularDiffusion:
    return TabularDiffusion(VOCAB, 3, seed=2).double()


def test_first_hitting_draws_the_mean_over_all_orders(table: TabularDiffusion) -> None:
    filling = Filling(SAMPLERS["first-hitting"])
    counts = drawn(table, filling, [MASK] * 3)
    assert chi_square(counts, in_random_order(table)) < QUANTILE
    assert filling.calls == 3


def test_two_ancestral_steps_draw_each_half_of_the_tokens_given_the_other(table: TabularDiffusion) -> None:
    def probability(text: tuple[int, ...]) -> float:
        total = 0.0
        for first in product([False, True], repeat=3):
            # each set of tokens is as probable to become visible in the first step, given none
            early = sum(nats for place, nats in table.nats(text, (0, 1, 2)).items() if first[place])
            late = table.nats(text, tuple(place for place in range(3) if not first[place]))
            total += math.exp(-early - sum(late.values())) / 8
        return total

    counts = drawn(table, Filling(AncestralSampler(), steps=2), [MASK] * 3)
    texts = product(range(1, VOCAB), repeat=3)
    assert chi_square(counts, {text: probability(text) for text in texts}) < QUANTILE


def test_one_ancestral_step_draws_all_tokens_independently(table: TabularDiffusion) -> None:
    counts = drawn(table, Filling(AncestralSampler(), steps=1), [MASK] * 3)
    texts = product(range(1, VOCAB), repeat=3)
    independent = {text: math.exp(-sum(table.nats(text, (0, 1, 2)).values())) for text in texts}
    assert chi_square(counts, independent) < QUANTILE
    # two distributions that this number of draws tells apart
    assert chi_square(counts, in_random_order(table)) > 2 * QUANTILE


def test_blocks_of_one_draw_from_left_to_right(table: TabularDiffusion) -> None:
    counts = drawn(table, Filling(AncestralSampler(), block=1), [MASK] * 3)
    texts = product(range(1, VOCAB), repeat=3)
    in_turn = {text: math.exp(-sum(table.nats(text, tuple(range(n, 3)))[n] for n in range(3))) for text in texts}
    assert chi_square(counts, in_turn) < QUANTILE


def test_given_tokens_stay_and_decide_the_rest(table: TabularDiffusion) -> None:
    counts = drawn(table, Filling(SAMPLERS["first-hitting"]), [2, MASK, 1])
    probabilities = {(2, token, 1): math.exp(-table.nats((2, token, 1), (1,))[1]) for token in (1, 2)}
    assert chi_square(counts, probabilities) < 10.83


def step_of(is_hidden: list[bool], confidence: list[float], number: int, steps: int) -> SamplingStep:
    draws = torch.full((1, len(is_hidden)), 0.5)
    return SamplingStep(torch.tensor([is_hidden]), draws, torch.tensor([confidence]), number, steps)


def test_the_most_confident_predictions_are_accepted_as_many_in_each_step() -> None:
    is_hidden = torch.tensor([[True] * 10])
    confidence = torch.rand(1, 10, generator=torch.Generator().manual_seed(0))
    order: list[Tensor] = []
    for number in range(4):
        step = SamplingStep(is_hidden, confidence, confidence, number, 4)
        accepted = LowConfidenceSampler().accept(step)
        assert bool((confidence[accepted].min() >= confidence[is_hidden & ~accepted].max()).all() if number < 3 else 1)
        order.append(accepted.sum())
        is_hidden = is_hidden & ~accepted
    # of ten tokens in four steps, the remainder of two goes to the first steps
    assert [int(count) for count in order] == [3, 3, 2, 2]
    only_visible = step_of([False, True], [0.9, 0.1], 0, 1)
    assert LowConfidenceSampler().accept(only_visible).tolist() == [[False, True]]


def test_at_temperature_zero_the_most_probable_token_is_taken(table: TabularDiffusion) -> None:
    filling = Filling(LowConfidenceSampler(), temperature=0)
    with torch.inference_mode():
        rows = filling.fill(table, canvas_of([[MASK] * 3] * 2)).tolist()
    text: list[int] = [MASK] * 3
    # by hand: one place at a time, that of the highest probability
    for _ in range(3):
        logits = table(torch.tensor([text])).logits[0].detach()
        logits[:, MASK] = -torch.inf
        probabilities = logits.softmax(-1)
        open_places = [place for place in range(3) if text[place] == MASK]
        place = max(open_places, key=lambda place: float(probabilities[place].max()))
        text[place] = int(probabilities[place].argmax())
    assert rows == [text, text]


def test_while_nothing_changes_the_model_is_not_called_again(table: TabularDiffusion) -> None:
    filling = Filling(AncestralSampler(), steps=400)
    with torch.inference_mode():
        filling.fill(table, canvas_of([[MASK] * 3]))
    assert 1 <= filling.calls <= 3
