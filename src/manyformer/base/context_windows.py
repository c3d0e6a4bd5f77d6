"""How a text is cut to overlapping windows, so that every scored token has earlier tokens before it."""

from typing import NamedTuple

from manyformer.base.errors import UserError


class ContextWindows(NamedTuple):
    """Windows of `context` tokens, each `stride` tokens after the one before, of which the last `stride` are scored.

    The first window of a document is scored whole: every token of a document is scored once, and predicted from the
    `context` - `stride` + 1 tokens before it at least, or from all of its document if these are fewer.
    """

    context: int
    stride: int

    @classmethod
    def of(cls, context: int | None, stride: int | None) -> "ContextWindows | None":
        """The windows of these options, None for no context; the stride is half the context unless given.

        Raises UserError for a stride without a context, or one that would skip tokens.
        """
        if context is None:
            if stride is not None:
                raise UserError(f"a stride ({stride}) needs a context: the tokens of a window, at least as many")
            return None
        stride = max(1, context // 2) if stride is None else stride
        if not 1 <= stride <= context:
            raise UserError(f"the stride ({stride}) must be from 1 to the context ({context}): others skip tokens")
        return cls(context, stride)
