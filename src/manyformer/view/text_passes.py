"""The passes of a trained model over a text, with labels for its tokens."""

from collections.abc import Callable, Sequence

from manyformer.errors import UserError
from manyformer.generate import translate
from manyformer.generate.decode_job import read_write_tokenizers
from manyformer.generate.protocol import TokenizerProtocol
from manyformer.models import Model
from manyformer.recipes.registry import task_of
from manyformer.tasks import EncodedText, TextPass

MAX_TOKEN_LENGTH = 12
"""The most characters of a token's label."""


def passes_over_text(model: Model, text: str, answer: str | None = None) -> list[TextPass]:
    """The passes of `model` over `text`; for a task with a source, `answer` is the target, or the model translates.

    Raises UserError for a model that has no tokenizer or reads no plain text.
    """
    task, tokenizers = task_of(model), read_write_tokenizers(model.tokenizer)
    if tokenizers.read is None or tokenizers.write is None:
        raise UserError("the model was saved without a tokenizer, so it cannot read text")
    if not task.takes_source and answer is not None:
        raise UserError(f"only an encoder-decoder writes an answer; a {type(model).__name__} reads the text alone")
    encoded = _encode(text, tokenizers.read)
    if task.takes_source:
        if answer is None:
            answer = translate(model, [text], tokenizer=(tokenizers.read, tokenizers.write))[0]  # type: ignore[arg-type]
        encoded = encoded._replace(answer=_encode(answer, tokenizers.write))
    return task.text_passes(model, encoded)


def _encode(text: str, tokenizer: TokenizerProtocol) -> EncodedText:
    return EncodedText(list(tokenizer.encode(text)), tokenizer, lambda tokens: token_labels(tokens, tokenizer))


def token_labels(tokens: Sequence[int], tokenizer: TokenizerProtocol) -> tuple[str, ...]:
    """Labels of tokens: their names or decoded text, of at most `MAX_TOKEN_LENGTH` characters."""
    token_text: Callable[[int], str] = getattr(tokenizer, "token", lambda token_id: tokenizer.decode([token_id]))
    return tuple((token_text(token_id).strip() or "␣")[:MAX_TOKEN_LENGTH] for token_id in tokens)
