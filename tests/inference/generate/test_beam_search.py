"""Beam search against enumeration of every sequence, against hand-made tables, and against itself."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from writers import Pair, Recurrent, Table

import manyformer as mf
from manyformer.inference.generate import (
    AverageLogProbPenalty,
    BeamScores,
    BeamSettings,
    BeamStopping,
    Decoding,
    ExactStopping,
    FullBeamStopping,
    GNMTPenalty,
    LengthPenalty,
    LikelyStopping,
    generate,
)

END = 2
SOURCES = [[3, 4, 5, 2], [6, 2], [3, 3, 7, 8, 9, 4, 2]]


def log_probability(model: Recurrent, prompt: list[int], answer: tuple[int, ...]) -> float:
    """Of `answer` after `prompt`, from one uncached call."""
    row = torch.tensor([[*prompt, *answer]])
    gains = model(row[:, :-1]).logits.double().log_softmax(-1)
    return float(gains.gather(2, row[:, 1:, None])[0, len(prompt) - 1 :].sum())


def everything(model: Recurrent, prompt: list[int], longest: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every answer that ends with the end token or at the limit, with its log-probability."""
    others = [token for token in range(model.vocab) if token != END]
    for length in range(1, longest + 1):
        lasts = range(model.vocab) if length == longest else [END]
        for begin in itertools.product(others, repeat=length - 1):
            for last in lasts:
                yield (*begin, last), log_probability(model, prompt, (*begin, last))


def complete(tokens: list[int], finish: str) -> tuple[int, ...]:
    return (*tokens, END) if finish == "end" else tuple(tokens)


@pytest.mark.parametrize("penalty", [GNMTPenalty(0.0), GNMTPenalty(0.6), AverageLogProbPenalty(1.0), GNMTPenalty(3.0)])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_finds_the_best_of_all_sequences(penalty: LengthPenalty, seed: int) -> None:
    model = Recurrent(3, seed=seed, sharp=1.0).eval()
    prompt = [0, 1]
    with torch.no_grad():
        scored = {
            answer: gain / float(penalty(torch.tensor(float(len(answer)))))
            for answer, gain in everything(model, prompt, 4)
        }
    best = sorted(scored, key=scored.__getitem__, reverse=True)[:5]
    decoding = Decoding(choice=BeamSettings(60, penalty, best=5), max_new=4, stop_ids=(END,))
    answers = generate(model, [prompt], decoding=decoding).rows[0]
    assert [complete(a.tokens, a.finish) for a in answers] == best
    assert [a.score for a in answers] == pytest.approx([scored[answer] for answer in best], abs=1e-5)


@pytest.mark.parametrize("sizes", [[3, 1, 5]])
def test_a_beam_of_one_is_greedy(sizes: list[int]) -> None:
    prompts = [torch.randint(3, 30, (size,)).tolist() for size in sizes]
    for model in (Recurrent(30).eval(), mf.build("transformer-lm", vocab=30, dim=32, depth=2, heads=2).eval()):
        greedy = generate(model, prompts, max_new=12, stop_ids=(END,))
        assert generate(model, prompts, max_new=12, stop_ids=(END,), beam=1).tokens == greedy.tokens


def test_the_penalties_by_hand() -> None:
    lengths = torch.tensor([1.0, 7.0, 13.0])
    assert GNMTPenalty(0.6)(lengths).tolist() == pytest.approx([1.0, 2**0.6, 3**0.6])
    assert AverageLogProbPenalty(1.0)(lengths).tolist() == [1.0, 7.0, 13.0]
    assert AverageLogProbPenalty(0.5)(lengths).tolist() == pytest.approx([1.0, math.sqrt(7), math.sqrt(13)])
    assert GNMTPenalty(0.0)(lengths).tolist() == AverageLogProbPenalty(0.0)(lengths).tolist() == [1.0, 1.0, 1.0]


def chain() -> Table:
    """After 0: end at once with 0.4, or 3 with 0.6; then 4, 5 and the end with 0.85 each: 0.3685 in all."""
    p = torch.full((6, 6), 1e-9)
    p[0, END], p[0, 3] = 0.4, 0.6
    for now, then in ((3, 4), (4, 5), (5, END)):
        p[now, then] = 0.85
        p[now, 0] = 0.15
    return Table(p.log())


@pytest.mark.parametrize(("alpha", "tokens"), [(0.0, []), (0.2, []), (0.22, [3, 4, 5]), (1.0, [3, 4, 5])])
def test_the_length_penalty_decides_between_short_and_long(alpha: float, tokens: list[int]) -> None:
    # 1 token against 4: were the end token not counted, 0.2 would do; were the start token counted, 0.22 would not
    answer = generate(chain(), [[0]], beam=3, length_penalty=alpha, max_new=6, stop_ids=(END,)).rows[0][0]
    assert answer.tokens == tokens
    assert answer.finish == "end"
    score = math.log(0.6 * 0.85**3) / 1.5**alpha if tokens else math.log(0.4)
    assert answer.score == pytest.approx(score, rel=1e-5)


def test_growing_sequences_compete_without_the_penalty() -> None:
    # by penalised score both would stay, by log-probability only 3 does, whose future is worse
    p = torch.full((6, 6), 1e-9)
    p[0, 3], p[0, 4] = 0.6, 0.4
    p[3, END], p[3, 5] = 0.3, 0.3
    p[4, END] = 0.99
    answer = generate(Table(p.log()), [[0]], beam=1, length_penalty=2.0, max_new=4, stop_ids=(END,))
    assert answer.tokens[0][0] == 3
    assert generate(Table(p.log()), [[0]], beam=2, length_penalty=0.0, max_new=4, stop_ids=(END,)).tokens[0] == [4]


class Never(BeamStopping):
    """Goes on to the limit."""

    def can_improve(self, scores: BeamScores) -> Tensor:
        return torch.ones_like(scores.live, dtype=torch.bool)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
@pytest.mark.parametrize("best", [1, 3])
def test_ending_when_proved_changes_nothing(alpha: float, best: int) -> None:
    answers, read = [], []
    for until in (ExactStopping(), Never(), LikelyStopping(), FullBeamStopping()):
        model = Recurrent(12, seed=3, sharp=1.5).eval()
        decoding = Decoding(choice=BeamSettings(4, GNMTPenalty(alpha), best, until), max_new=25, stop_ids=(END, 5))
        answers.append([generate(model, [[start]], decoding=decoding).rows for start in range(6, 12)])
        read.append(model.read)
    proved, never, likely, full = read
    assert answers[0] == answers[1]
    assert proved < never
    assert full <= likely < never


def test_a_prompt_ends_for_itself() -> None:
    model = Recurrent(12, seed=3, sharp=1.5).eval()
    prompts = [[start] * (1 + start % 3) for start in range(6, 12)]
    for until in (ExactStopping(), LikelyStopping(), FullBeamStopping()):
        decoding = Decoding(choice=BeamSettings(3, best=2, stopping=until), max_new=25, stop_ids=(END,))
        alone = [generate(model, [prompt], decoding=decoding).rows[0] for prompt in prompts]
        for row, other in zip(generate(model, prompts, decoding=decoding).rows, alone):
            assert [(a.tokens, a.finish) for a in row] == [(a.tokens, a.finish) for a in other]
            assert [a.score for a in row] == pytest.approx([a.score for a in other], abs=1e-5)


@pytest.mark.parametrize("kind", ["toy", "transformer"])
def test_translations_do_not_depend_on_cache_or_company(kind: str) -> None:
    model = Pair(20, sharp=1.0) if kind == "toy" else mf.build("transformer", vocab=20, dim=32, depth=2, heads=2)
    model.eval()
    decoding = Decoding(choice=BeamSettings(4, best=3), max_new=15)
    together = generate(model, SOURCES, decoding=decoding)
    again = generate(model, SOURCES, decoding=Decoding(choice=BeamSettings(4, best=3), max_new=15, use_cache=False))
    alone = [generate(model, [source], decoding=decoding).rows[0] for source in SOURCES]
    for rows in (again.rows, tuple(alone)):
        assert [[a.tokens for a in row] for row in rows] == [[a.tokens for a in row] for row in together.rows]
    # padding and the start token never come, and the best come first
    assert not {0, 1, END} & {token for row in together.rows for a in row for token in a.tokens}
    assert all(row[0].score >= row[1].score >= row[2].score for row in together.rows)
    assert together.stats.cache_bytes > 0
    assert again.stats.cache_bytes == 0


def test_a_source_is_encoded_once() -> None:
    model = Pair(20).eval()
    generate(model, SOURCES, beam=4, max_new=10)
    assert model.encoded == len(SOURCES) * max(map(len, SOURCES))


def test_scores_are_the_models_own() -> None:
    model = Recurrent(12, seed=5).eval()
    for answer in generate(model, [[3, 4]], beam=4, best=4, length_penalty=0.6, max_new=8, stop_ids=(END,)).rows[0]:
        tokens = complete(answer.tokens, answer.finish)
        with torch.no_grad():
            gain = log_probability(model, [3, 4], tokens)
        assert answer.score == pytest.approx(gain / ((5 + len(tokens)) / 6) ** 0.6, abs=1e-5)


def test_no_repeat_acts_on_each_sequence_of_the_beam() -> None:
    model = Recurrent(6, seed=1, sharp=3.0).eval()
    free = generate(model, [[0, 1]], beam=4, max_new=20)
    bound = generate(model, [[0, 1]], beam=4, best=4, max_new=20, no_repeat_ngram=2)
    pairs = [*itertools.pairwise([0, 1, *free.tokens[0]])]
    assert len(set(pairs)) < len(pairs)
    for answer in bound.rows[0]:
        pairs = [*itertools.pairwise([0, 1, *answer.tokens])]
        assert len(set(pairs)) == len(pairs)


def test_limits_beyond_the_source_are_each_their_own() -> None:
    model = Pair(20, sharp=0.1).eval()
    answers = generate(model, SOURCES, decoding=Decoding(choice=BeamSettings(2), stop_ids=()))
    assert [len(tokens) for tokens in answers.tokens] == [len(source) + 50 for source in SOURCES]
    short = Pair(20, sharp=0.1, max_length=9).eval()
    assert [len(tokens) for tokens in generate(short, SOURCES, beam=2, stop_ids=()).tokens] == [9, 9, 9]


def test_what_beam_search_refuses() -> None:
    model = Recurrent(8).eval()
    with pytest.raises(ValueError, match="beam must be 1 or wider, got 0"):
        generate(model, [[1]], beam=0)
    with pytest.raises(ValueError, match="best must be from 1 to the beam's width 3, got 4"):
        generate(model, [[1]], beam=3, best=4)
    with pytest.raises(ValueError, match="alpha must be 0"):
        generate(model, [[1]], beam=3, length_penalty=-0.5)
    with pytest.raises(ValueError, match="stop strings"):
        generate(model, [[1]], beam=3, stop="x")
    with pytest.raises(ValueError, match="nothing to stream"):
        generate(model, [[1]], beam=3, on_piece=print)
    broken = Table(torch.zeros(4, 4).index_fill(0, torch.tensor([3]), math.nan))
    with pytest.raises(ValueError, match="nothing to choose from for prompt 1"):
        generate(broken, [[0], [3]], decoding=Decoding(choice=BeamSettings(2), ban=(3,), max_new=3))
