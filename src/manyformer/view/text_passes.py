"""The passes of a trained model over a text, with labels for its tokens."""

import unicodedata
from collections.abc import Callable, Sequence

from manyformer.errors import UserError
from manyformer.generate import translate
from manyformer.generate.generate import read_write_tokenizers
from manyformer.generate.protocol import TokenizerProtocol
from manyformer.models import Model
from manyformer.recipes.registry import task_of
from manyformer.tasks import EncodedText, TextPass

MAX_TOKEN_LENGTH = 12
"""The most characters of a token's label."""


TokenLabels = Callable[[Sequence[int], TokenizerProtocol], tuple[str, ...]]
"""A function that labels token ids for display."""

_VISIBLE_CHARACTERS = {"\n": "↵", "\t": "⇥"}


def token_labels(tokens: Sequence[int], tokenizer: TokenizerProtocol) -> tuple[str, ...]:
    """Labels of tokens: their names or decoded text, of at most `MAX_TOKEN_LENGTH` characters."""
    return tuple((text.strip() or "␣")[:MAX_TOKEN_LENGTH] for text in _token_texts(tokens, tokenizer))


def full_token_labels(tokens: Sequence[int], tokenizer: TokenizerProtocol) -> tuple[str, ...]:
    """Labels of tokens with their spaces, where characters that have no shape are replaced by a symbol or an escape."""
    return tuple(map(visible_text, _token_texts(tokens, tokenizer)))


def visible_text(text: str) -> str:
    """A text where characters that have no shape are replaced by a symbol or an escape."""
    return "".join(map(_visible_character, text))


def _token_texts(tokens: Sequence[int], tokenizer: TokenizerProtocol) -> list[str]:
    token_text: Callable[[int], str] = getattr(tokenizer, "token", lambda token_id: tokenizer.decode([token_id]))
    return [token_text(token_id) for token_id in tokens]


def _visible_character(character: str) -> str:
    if character in _VISIBLE_CHARACTERS:
        return _VISIBLE_CHARACTERS[character]
    # controls, marks and overrides of the writing direction, surrogates, separators of lines and paragraphs
    has_shape = unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
    if has_shape:
        return character
    return f"\\u{ord(character):04x}"


def passes_over_text(
    model: Model, text: str, answer: str | None = None, *, labels: TokenLabels = token_labels
) -> list[TextPass]:
    """The passes of `model` over `text`; for a task with a source, `answer` is the target, or the model translates.

    Raises UserError for a model that has no tokenizer or reads no plain text.
    """
    task = task_of(model)
    tokenizers = read_write_tokenizers(model.tokenizer)
    if tokenizers.read is None or tokenizers.write is None:
        raise UserError("the model was saved without a tokenizer, so it cannot read text")
    if not task.takes_source and answer is not None:
        raise UserError(f"only an encoder-decoder writes an answer; a {type(model).__name__} reads the text alone")
    encoded = _encode(text, tokenizers.read, labels)
    if task.generates == "answer":
        if answer is None:
            answer = translate(model, [text], tokenizer=(tokenizers.read, tokenizers.write))[0]  # type: ignore[arg-type]
        encoded = encoded._replace(answer=_encode(answer, tokenizers.write, labels))
    return task.text_passes(model, encoded)


def _encode(text: str, tokenizer: TokenizerProtocol, labels: TokenLabels) -> EncodedText:
    return EncodedText(list(tokenizer.encode(text)), tokenizer, lambda tokens: labels(tokens, tokenizer))
