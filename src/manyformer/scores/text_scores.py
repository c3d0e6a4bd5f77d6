"""Scores of texts against references, through sacrebleu, which says how exactly each was computed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from manyformer.errors import UserError
from manyformer.scores.record import ScoreRecord, check_pairs

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric

References = Sequence[str] | Sequence[Sequence[str]]
"""One reference for each text, or several whole sets of them."""


def bleu(
    texts: Sequence[str], references: References, *, tokenize: str | None = None, lowercase: bool = False
) -> ScoreRecord:
    """BLEU of a corpus (Papineni et al. 2002; Post 2018), 0 to 100.

    `tokenize` is sacrebleu's: "13a" unless given, "none" for text that is tokenised already, "char", "intl", "zh", ...
    Raises UserError for unequal lengths, for nothing at all and for an unknown tokenizer.
    """
    from sacrebleu.metrics.bleu import BLEU

    if tokenize is not None and tokenize not in BLEU.TOKENIZERS:
        raise UserError(f"tokenize must be one of {', '.join(sorted(BLEU.TOKENIZERS))}, got '{tokenize}'")
    # force only silences the warning about text that looks tokenised
    metric = BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none")
    return _score("BLEU", metric, texts, references)


def chrf(texts: Sequence[str], references: References, *, word_order: int = 0) -> ScoreRecord:
    """chrF of a corpus (Popović 2015), 0 to 100; `word_order` 2 is chrF++ (Popović 2017). Raises as `bleu`."""
    from sacrebleu.metrics.chrf import CHRF

    if word_order < 0:
        raise UserError(f"word_order must be 0 (chrF), 2 (chrF++) or another length of n-grams, got {word_order}")
    return _score("chrF" + "+" * word_order, CHRF(word_order=word_order), texts, references)


def ter(texts: Sequence[str], references: References, *, case_sensitive: bool = False) -> ScoreRecord:
    """Translation edit rate of a corpus (Snover et al. 2006), edits per 100 words: less is better. Raises as `bleu`."""
    from sacrebleu.metrics.ter import TER

    return _score("TER", TER(case_sensitive=case_sensitive), texts, references)


def exact(texts: Sequence[str], references: Sequence[str]) -> ScoreRecord:
    """How many of 100 texts are the reference, letter by letter. Raises as `bleu`."""
    check_pairs(texts, references, "texts")
    same = sum(text == reference for text, reference in zip(texts, references))
    return ScoreRecord("exact", 100 * same / len(texts), f"items:{len(texts)}")


def _score(name: str, metric: "Metric", texts: Sequence[str], references: References) -> ScoreRecord:
    single = [reference for reference in references if isinstance(reference, str)]
    sets = [single] if len(single) == len(references) else [list(one) for one in references]
    for one in sets:
        check_pairs(texts, one, "texts")
    found = metric.corpus_score(list(texts), sets)
    precisions = {f"precision {n}": value for n, value in enumerate(getattr(found, "precisions", []), 1)}
    return ScoreRecord(name, float(found.score), metric.get_signature().format(), parts=precisions)
