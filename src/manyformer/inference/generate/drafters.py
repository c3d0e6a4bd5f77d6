"""What proposes tokens that a model then verifies together: the model's own layers ahead, or what the text has said."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.inference.decoding_options import DrafterName
from manyformer.models.ahead import ParallelAhead, SequentialAhead
from manyformer.models.generative_model import LanguageModel
from manyformer.models.head import apply_head
from manyformer.nn.core import Context, Layer, LayerOutput, State, contiguous_positions

LOOKUP_TOKENS = 3
"""The longest end of the text that is looked for in what came before it."""


class DraftedToken(NamedTuple):
    """A proposed token, and the probabilities (v) it was sampled from in float64; None for a token that is certain."""

    token: int
    probabilities: Float[Tensor, " v"] | None = None


class VerifiedText(NamedTuple):
    """A text that stands: its tokens, of which the model has not read the last one, and its newest hidden states.

    `hidden` are those of the tokens before the last one that the drafter has not been given yet."""

    tokens: Int[Tensor, "1 t"]
    hidden: Float[Tensor, "1 n d"]


ChooseDraft = Callable[[Float[Tensor, "1 v"], list[int]], DraftedToken]
"""Chooses a token by its logits, given the tokens that were drafted before it."""


class Drafter(ABC):
    """Proposes how a text goes on. What it proposes decides how fast a text is decoded, never what is in it."""

    @abstractmethod
    def draft(self, text: VerifiedText, count: int, choose: ChooseDraft) -> list[DraftedToken]:
        """At most `count` tokens after the text, which may be none; called after every change of the text."""


@final
class LookupDrafter(Drafter):
    """What followed the last tokens of the text where they stood before (Saxena 2023, prompt lookup decoding).

    The longest end of up to `LOOKUP_TOKENS` tokens that occurs earlier counts, and its latest place."""

    def draft(self, text: VerifiedText, count: int, choose: ChooseDraft) -> list[DraftedToken]:
        tokens = text.tokens[0]
        for size in range(min(LOOKUP_TOKENS, len(tokens) - 1), 0, -1):
            # every run of so many tokens but the last one, which is the end itself
            runs = tokens[:-1].unfold(0, size, 1)
            places = (runs == tokens[-size:]).all(-1).nonzero()
            if len(places):
                start = int(places[-1]) + size
                return [DraftedToken(token) for token in tokens[start : start + count].tolist()]
        return []


@final
class ParallelDrafter(Drafter):
    """The layers of `ParallelAhead`: each proposes one token, from the last hidden state of the text."""

    def __init__(self, model: LanguageModel, ahead: ParallelAhead, count: int) -> None:
        self.output = model.head
        self.heads = ahead.in_order()[:count]
        self.streams = [_AheadStream(model, head.block, 0) for head in self.heads]

    def draft(self, text: VerifiedText, count: int, choose: ChooseDraft) -> list[DraftedToken]:
        drafts: list[DraftedToken] = []
        # all of them read the new states, also those whose tokens nobody wants
        for head, stream in zip(self.heads, self.streams, strict=True):
            y = stream.read(partial(head, text.hidden), text.hidden.shape[1])
            if len(drafts) < count:
                logits = apply_head(self.output, y[:, -1]).float()
                drafts.append(choose(logits, [draft.token for draft in drafts]))
        return drafts


@final
class SequentialDrafter(Drafter):
    """The chain of `SequentialAhead`, whose module k proposes the k-th token, given those before it.

    A module's state holds tokens that stand, and drafted ones are read from it without a change: nothing has to go
    back. The last state that a module but the first reads waits for its next token, which only the model decides."""

    def __init__(self, model: LanguageModel, ahead: SequentialAhead, count: int) -> None:
        self.embed = model.embed
        self.head = model.head
        self.modules = ahead.in_order()[:count]
        # the first tokens of a text have no state k tokens before
        self.streams = [_AheadStream(model, module.block, depth) for depth, module in enumerate(self.modules, 1)]
        self.waiting: list[Float[Tensor, "1 1 d"] | None] = [None] * len(self.modules)

    def draft(self, text: VerifiedText, count: int, choose: ChooseDraft) -> list[DraftedToken]:
        drafts: list[DraftedToken] = []
        # states of tokens that stand, and of drafted ones, as the module before made them
        states = text.hidden
        drafted_states = states[:, :0]
        end = text.tokens.shape[1]
        for index in range(len(self.modules)):
            last = None
            if index:
                waiting = self.waiting[index]
                states = states if waiting is None else torch.cat([waiting, states], dim=1)
                last = states[:, -1:]
                self.waiting[index] = last
                states = states[:, :-1]
            if states.shape[1]:
                # with the last tokens of the text
                start = end - states.shape[1]
                states = self._run(index, text.tokens[:, start:], start, states, stands=True)
            if len(drafts) == count:
                continue
            if last is None:
                newest = states
            else:
                chain = torch.cat([last, drafted_states], dim=1)
                # a text shorter than the chain has no state of its own here, and no token beside it
                first = len(drafts) - chain.shape[1]
                tokens = text.tokens.new_tensor([[draft.token for draft in drafts[first:]]])
                newest = drafted_states = self._run(index, tokens, end + first, chain, stands=False)
            logits = apply_head(self.head, newest[:, -1]).float()
            drafts.append(choose(logits, [draft.token for draft in drafts]))
        return drafts

    def _run(
        self, index: int, tokens: Int[Tensor, "1 n"], start: int, hidden: Float[Tensor, "1 n d"], *, stands: bool
    ) -> Float[Tensor, "1 n d"]:
        """The states of tokens from column `start` on, by one module; those that stand become part of its state."""
        embedded = self.embed(tokens, contiguous_positions(1, start, start + tokens.shape[1], tokens.device))
        stream = self.streams[index]
        assert stream.column == start or not stands
        run = stream.read if stands else stream.preview
        return run(partial(self.modules[index], embedded, hidden), tokens.shape[1])


RunLayer = Callable[[Context, State], LayerOutput]
"""A layer ahead as a function of the context and its state."""


@final
class _AheadStream:
    """What a layer ahead remembers of the tokens that stand, and the column of its next one."""

    def __init__(self, model: LanguageModel, block: Layer, column: int) -> None:
        self.device = model.device
        self.column = column
        # without capacity: what is read on top of a state leaves it as it was
        self.state = block.init_state(1, device=self.device, dtype=model.state_dtype)

    def read(self, run: RunLayer, count: int) -> Float[Tensor, "1 n d"]:
        """The states of the next `count` tokens, which stand."""
        y, self.state, _ = self._run(run, count)
        self.column += count
        return y

    def preview(self, run: RunLayer, count: int) -> Float[Tensor, "1 n d"]:
        """The states of `count` tokens that may turn out not to be the next ones."""
        return self._run(run, count).y

    def _run(self, run: RunLayer, count: int) -> LayerOutput:
        positions = contiguous_positions(1, self.column, self.column + count, self.device)
        return run(Context(positions), self.state)


def make_drafter(model: LanguageModel, count: int, name: DrafterName | None) -> Drafter:
    """What drafts `count` tokens at a time for this model. Raises UserError for more than its layers can propose."""
    if name == "lookup":
        return LookupDrafter()
    ahead = model.auxiliary
    if not isinstance(ahead, ParallelAhead | SequentialAhead):
        raise UserError(
            "draft needs a model with layers that predict further tokens (ahead=sequential or parallel), and this one "
            "has none: drafter=lookup proposes what the text has said before"
        )
    if count > ahead.tokens:
        raise UserError(
            f"draft ({count}) is more than the {ahead.tokens} tokens after the next one that this model predicts"
        )
    if isinstance(ahead, ParallelAhead):
        return ParallelDrafter(model, ahead, count)
    return SequentialDrafter(model, ahead, count)
