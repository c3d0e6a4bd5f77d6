"""Error rates against edits that are counted one by one."""

import pytest

from manyformer.errors import UserError
from manyformer.ops.ctc import edit_distance
from manyformer.scores import character_error_rate, word_error_rate

TEXTS = ["one two two", "", "seven eight", "nine"]
REFERENCES = ["one two three", "four", "seven eight", "five nine ten"]


def test_error_rates_are_edits_over_the_length_of_all_references() -> None:
    word_edits = sum(edit_distance(text.split(), reference.split()) for text, reference in zip(TEXTS, REFERENCES))
    words = word_error_rate(TEXTS, REFERENCES)
    assert words.value == pytest.approx(100 * word_edits / 9)
    assert sum(words.parts.values()) == pytest.approx(words.value)
    character_edits = sum(edit_distance(text, reference) for text, reference in zip(TEXTS, REFERENCES))
    characters = character_error_rate(TEXTS, REFERENCES)
    assert characters.value == pytest.approx(100 * character_edits / sum(map(len, REFERENCES)))
    assert characters.parts["deletions"] > characters.parts["insertions"]


def test_a_rate_above_100_and_input_without_one() -> None:
    assert word_error_rate(["a b c"], ["d"]).value == 300
    with pytest.raises(UserError, match="no words"):
        word_error_rate(["a"], [" "])
    with pytest.raises(UserError, match="1 transcripts cannot be scored against 2"):
        character_error_rate(["a"], ["b", "c"])
