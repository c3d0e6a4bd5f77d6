"""The notation of hybrids: a text that says which mixers each layer has, and what follows them.

    pattern = layer+        layer = (mixer | '(' mixer mixer+ ')') ['.']  |  '-'  |  'E'

A mixer is a letter; its layer also has a feed-forward branch, unless a dot follows. Mixers in parentheses read the same
input and are added side by side. '-' is a layer that is a feed-forward branch alone, 'E' one of experts alone. The
layers of a model are those of the pattern, repeated.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from manyformer.base.errors import UserError
from manyformer.nn.attention.attention import MultiHeadLayer
from manyformer.nn.core import Layer, ParallelLayers
from manyformer.recipes.parts.baselines import LayerMaker

MixerMaker = Callable[[int], Layer]
"""Makes the mixer of the layer of a number, counted from 0."""

FEED_FORWARD = "-"
EXPERTS = "E"


class LayerKind(NamedTuple):
    """The layer of one place in a pattern: the letters of its mixers, none for one without, and what follows them.

    `then` is `FEED_FORWARD`, `EXPERTS`, or empty for a layer of mixers alone."""

    mixers: str
    then: str


def parse_pattern(pattern: str, letters: Mapping[str, str], keyword: str = "pattern") -> list[LayerKind]:
    """The layers of a pattern, whose mixers are `letters`, each with its meaning. Raises UserError, with the place."""
    if not pattern:
        raise UserError(f"{keyword} ('') must have one layer or more, of {_describe(letters)}")
    kinds: list[LayerKind] = []
    place = 0
    while place < len(pattern):
        character = pattern[place]
        if character in (FEED_FORWARD, EXPERTS):
            kinds.append(LayerKind("", character))
            place += 1
            continue
        mixers, place = _parse_mixers(pattern, place, letters, keyword)
        has_feed_forward = pattern[place : place + 1] != "."
        kinds.append(LayerKind(mixers, FEED_FORWARD if has_feed_forward else ""))
        place += 0 if has_feed_forward else 1
    return kinds


def _parse_mixers(pattern: str, place: int, letters: Mapping[str, str], keyword: str) -> tuple[str, int]:
    """The letters of the mixers of the layer that begins at `place`, and the place after them."""
    if pattern[place] != "(":
        _check_letter(pattern, place, letters, keyword)
        return pattern[place], place + 1
    end = pattern.find(")", place)
    if end < 0:
        raise UserError(f"{keyword} ('{pattern}'): the '(' at place {place + 1} is not closed")
    for inner in range(place + 1, end):
        _check_letter(pattern, inner, letters, keyword)
    if end - place < 3:
        raise UserError(
            f"{keyword} ('{pattern}'): the parentheses at place {place + 1} hold mixers side by side, so at least two"
        )
    return pattern[place + 1 : end], end + 1


def _check_letter(pattern: str, place: int, letters: Mapping[str, str], keyword: str) -> None:
    character = pattern[place]
    if character in letters:
        return
    place_text = f"'{character}' at place {place + 1}"
    if character == ".":
        raise UserError(
            f"{keyword} ('{pattern}'): {place_text} follows no mixer, whose feed-forward branch it would remove"
        )
    raise UserError(f"{keyword} ('{pattern}'): {place_text} is no mixer; possible are {_describe(letters)}")


def _describe(letters: Mapping[str, str]) -> str:
    mixers = ", ".join(f"{letter} ({meaning})" for letter, meaning in letters.items())
    return f"{mixers}; {FEED_FORWARD} and {EXPERTS} are layers without a mixer"


def layers_of_pattern(
    kinds: Sequence[LayerKind],
    mixers: Mapping[str, MixerMaker],
    feed_forwards: Mapping[str, Callable[[], Layer]],
    shared: str = "",
) -> list[LayerMaker]:
    """The makers of the layers of a pattern, which take turns in `stack`; `feed_forwards` are by what follows mixers.

    A kind whose letters are all `shared` is one layer, with the same weights in all of its places."""
    makers: dict[LayerKind, LayerMaker] = {}
    for kind in kinds:
        make = partial(_make_branches, kind, mixers, feed_forwards)
        makers[kind] = _always_the_first(make) if set(kind.mixers or kind.then) <= set(shared) else make
    return [makers[kind] for kind in kinds]


def _make_branches(
    kind: LayerKind, mixers: Mapping[str, MixerMaker], feed_forwards: Mapping[str, Callable[[], Layer]], number: int
) -> dict[str, Layer]:
    """The branches of the layer of a number."""
    mixer_layers = [mixers[letter](number) for letter in kind.mixers]
    branches: dict[str, Layer] = {}
    if len(mixer_layers) == 1:
        branches["attention" if isinstance(mixer_layers[0], MultiHeadLayer) else "mixer"] = mixer_layers[0]
    elif mixer_layers:
        branches["mixer"] = ParallelLayers(**{f"heads{place}": mixer for place, mixer in enumerate(mixer_layers)})
    if kind.then:
        branches["ff"] = feed_forwards[kind.then]()
    return branches


def _always_the_first(make: LayerMaker) -> LayerMaker:
    first_layer: list[Mapping[str, Layer] | Layer] = []

    def make_once(number: int) -> Mapping[str, Layer] | Layer:
        if not first_layer:
            first_layer.append(make(number))
        return first_layer[0]

    return make_once
