"""Writing with a model: greedy, sampling and beam search, in batches, through the model's explicit state.

`generate(model, prompts, ...)` is the usual way in. A way to choose (`Greedy`, `Sample`, `Beam`), changes to the
logits (`TopP(0.9)`, ...) and limits make a `Decoding`; everything needs only `model.start`, `model(tokens, state)` and
`tree_map`.
"""

from manyformer.generate.api import generate, stream
from manyformer.generate.decoding import BeyondSource, Decoding, settings
from manyformer.generate.painting import Painting, complete, paint
from manyformer.generate.picking import (
    GNMT,
    Average,
    Beam,
    Ending,
    Full,
    Greedy,
    LengthPenalty,
    Likely,
    Pick,
    Proved,
    Sample,
)
from manyformer.generate.result import Generated, Hypothesis, Piece, Stats
from manyformer.generate.shaping import Ban, MinP, NoRepeat, RepetitionPenalty, Shaping, Temperature, TopK, TopP
from manyformer.generate.translator import Translator, translate

__all__ = [
    "GNMT",
    "Average",
    "Ban",
    "Beam",
    "BeyondSource",
    "Decoding",
    "Ending",
    "Full",
    "Generated",
    "Greedy",
    "Hypothesis",
    "LengthPenalty",
    "Likely",
    "MinP",
    "NoRepeat",
    "Painting",
    "Pick",
    "Piece",
    "Proved",
    "RepetitionPenalty",
    "Sample",
    "Shaping",
    "Stats",
    "Temperature",
    "TopK",
    "TopP",
    "Translator",
    "complete",
    "generate",
    "paint",
    "settings",
    "stream",
    "translate",
]
