"""Many sentences: in order, whatever the batches; blank lines; what is too long is told by its line."""

from collections.abc import Iterator
from typing import Any

import pytest
from writers import Pair

import manyformer as mf
from manyformer.data.tokenizers.saved_tokenizers import train_tokenizer
from manyformer.inference.generate import BeamSettings, Decoding, GreedyChoice, Translator, generate, translate

BYTES = train_tokenizer("byte", [])
LINES = ["one two", "", "three", "a", "   ", "four five six seven", "b", "eight nine", "\t"]


def model(**options: Any) -> Pair:
    return Pair(BYTES.vocab, seed=4, **options).eval()


@pytest.mark.parametrize("tokens", [1, 30, 10_000])
@pytest.mark.parametrize("window", [1, 4, 1000])
def test_every_line_gets_its_own_translation(tokens: int, window: int) -> None:
    decoding = Decoding(choice=BeamSettings(3, best=2), max_new=8)
    translator = Translator(model(), tokenizer=BYTES, decoding=decoding, tokens=tokens, window=window)
    actual = list(translator(LINES))
    for line, answers in zip(LINES, actual, strict=True):
        if line.strip():
            alone = generate(model(), [line], tokenizer=BYTES, decoding=decoding).rows[0]
            assert [(a.tokens, a.text) for a in answers] == [(a.tokens, a.text) for a in alone]
        else:
            assert [a.text for a in answers] == [""]
    assert translator.stats.prompts == 6
    assert translator.stats.new_tokens > 0


def test_batches_are_as_large_as_allowed_and_no_larger() -> None:
    rows = {n: [5] * length for n, length in enumerate([3, 9, 4, 4, 1, 20])}
    translator = Translator(model(), tokenizer=BYTES, decoding=Decoding(choice=BeamSettings(2)), tokens=24)
    sizes = [[len(row) for row in batch.values()] for batch in translator._batches(rows)]
    assert sizes == [[20], [9], [4, 4, 3], [1]]
    assert all(len(batch) == 1 or 2 * len(batch) * batch[0] <= 24 for batch in sizes)


def test_lines_are_read_only_as_they_are_needed() -> None:
    read = []

    def typed() -> Iterator[str]:
        for line in LINES:
            read.append(line)
            yield line

    answers = Translator(model(), tokenizer=BYTES, decoding=Decoding(choice=GreedyChoice(), max_new=3), window=2)(
        typed()
    )
    next(answers)
    assert read == LINES[:2]


def test_a_line_that_is_too_long_is_named() -> None:
    translator = Translator(model(max_length=12), tokenizer=BYTES, window=2)
    with pytest.raises(ValueError, match="line 6 has 20 tokens, but the model allows at most 12"):
        list(translator(LINES))


def test_the_real_model_and_separate_tokenizers() -> None:
    letters = train_tokenizer("char", ["abcdefghijklmnopqrstuvwxyz "])
    real = mf.build("transformer", vocab=60, dim=32, depth=1, heads=2).eval()
    # the model has more outputs than there are letters, and never uses them
    few = train_tokenizer("char", ["ab"])
    assert {*"".join(translate(real, LINES, tokenizer=(letters, few)))} <= {*"ab\ufffd"}
    texts = translate(Pair(BYTES.vocab).eval(), LINES, tokenizer=(letters, BYTES))
    assert len(texts) == len(LINES)
    assert texts == translate(Pair(BYTES.vocab).eval(), LINES, tokenizer=(letters, BYTES))


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="tokens and window must be 1 or more, got 0 and 5"):
        Translator(model(), tokenizer=BYTES, tokens=0, window=5)
