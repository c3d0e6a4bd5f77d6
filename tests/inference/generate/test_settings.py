"""Flat words become objects, and contradictions become sentences."""

from typing import Any

import pytest

from manyformer.inference.decoding_options import DecodingOptions
from manyformer.inference.generate import (
    BeamSettings,
    Decoding,
    GNMTPenalty,
    GreedyChoice,
    MinPProcessor,
    NoRepeatNGramProcessor,
    RepetitionPenaltyProcessor,
    SampledChoice,
    SourceLengthLimit,
    TemperatureProcessor,
    TopKProcessor,
    TopPProcessor,
    decoding_from_options,
)


@pytest.mark.parametrize(
    ("words", "decoding"),
    [
        ({}, Decoding()),
        ({"temperature": 0}, Decoding(choice=GreedyChoice())),
        ({"temperature": 0, "seed": 3}, Decoding(choice=GreedyChoice())),
        ({"greedy": True}, Decoding()),
        ({"greedy": True, "seed": 3, "temperature": 0}, Decoding()),
        ({"greedy": False}, Decoding(choice=SampledChoice())),
        ({"greedy": False, "top_k": 3}, Decoding(choice=SampledChoice(), processors=(TopKProcessor(3),))),
        ({"temperature": 1}, Decoding(choice=SampledChoice())),
        ({"seed": 3}, Decoding(choice=SampledChoice(3))),
        ({"samples": 2}, Decoding(choice=SampledChoice(samples=2))),
        ({"temperature": 0.5, "top_p": 1}, Decoding(choice=SampledChoice(), processors=(TemperatureProcessor(0.5),))),
        (
            {"temperature": 2, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 1},
            Decoding(
                choice=SampledChoice(1),
                processors=(TemperatureProcessor(2), TopKProcessor(3), TopPProcessor(0.5), MinPProcessor(0.1)),
            ),
        ),
        (
            {"repetition_penalty": 1.2, "no_repeat_ngram": 3},
            Decoding(processors=(RepetitionPenaltyProcessor(1.2), NoRepeatNGramProcessor(3))),
        ),
        ({"beam": 5}, Decoding(choice=BeamSettings(5, GNMTPenalty(0.6)))),
        ({"beam": 5, "length_penalty": 0, "best": 2}, Decoding(choice=BeamSettings(5, GNMTPenalty(0), 2))),
        ({"beam": 2, "no_repeat_ngram": 2}, Decoding(choice=BeamSettings(2), processors=(NoRepeatNGramProcessor(2),))),
        (
            {"stop": "\n", "stop_ids": (2,), "max_new": 7, "use_cache": False},
            Decoding(stop=("\n",), stop_ids=(2,), max_new=7, use_cache=False),
        ),
    ],
)
def test_words_make_objects(words: dict[str, Any], decoding: Decoding) -> None:
    assert decoding_from_options(**words) == decoding


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"temperature": 0, "top_k": 3}, "temperature 0 always takes the likeliest token: leave out top_k"),
        ({"temperature": 0, "seed": 1, "samples": 2}, "temperature 0"),
        ({"temperature": 0, "greedy": False}, "temperature 0 always takes the likeliest token: leave out greedy"),
        ({"greedy": True, "top_p": 0.5}, "greedy always takes the likeliest token: leave out top_p, or greedy"),
        ({"greedy": True, "samples": 2}, "greedy always takes the likeliest token: leave out samples"),
        ({"beam": 3, "greedy": True}, "beam search does not sample: leave out greedy"),
        ({"temperature": -1}, "temperature must be a number above 0, got -1; for the most likely token, 0"),
        ({"beam": 3, "temperature": 0.5}, "beam search does not sample: leave out temperature"),
        ({"beam": 3, "seed": 1}, "beam search does not sample: leave out seed"),
        ({"beam": 3, "samples": 2}, "beam search does not sample: leave out samples"),
        ({"length_penalty": 0.5}, "length_penalty is for beam search: give beam as well"),
        ({"best": 2}, "best is for beam search"),
        ({"max_new": 0}, "max_new must be 1 or more tokens, got 0"),
        ({"samples": 0}, "samples must be 1 or more, got 0"),
        ({"seed": -1}, "seed must be from 0 to"),
        ({"stop": ""}, "a stop string must not be empty"),
        ({"stop": ("a", "")}, "a stop string must not be empty"),
    ],
)
def test_contradicting_options_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoding_from_options(**words)


def test_an_object_without_effect_is_refused() -> None:
    with pytest.raises(
        ValueError, match="greedy decoding takes the likeliest tokens, so TopPProcessor would change nothing"
    ):
        Decoding(processors=(TopPProcessor(0.5),))
    with pytest.raises(ValueError, match="beam search takes the likeliest tokens, so TemperatureProcessor"):
        Decoding(choice=BeamSettings(), processors=(NoRepeatNGramProcessor(2), TemperatureProcessor(0.5)))
    with pytest.raises(ValueError, match="extra must be 0 or more"):
        SourceLengthLimit(-1)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match=r"decoding has no option 'temprature'; did you mean temperature\?"):
        decoding_from_options(temprature=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", sorted(DecodingOptions.__annotations__))
def test_none_counts_as_not_given(name: str) -> None:
    assert decoding_from_options(**{name: () if name == "stop" else None}) == Decoding()
