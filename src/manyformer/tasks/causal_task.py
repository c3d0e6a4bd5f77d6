"""The common part of the tasks of a language model: text and images."""

import math
from typing import Any

from torch import Generator, Tensor

from manyformer.batches import IGNORE_INDEX, CausalLMBatch
from manyformer.core import State, WatchFn, no_watch
from manyformer.models import LanguageModel, ModelOutput
from manyformer.scores import ScoreKind
from manyformer.tasks.task import Inputs, Task
from manyformer.tasks.toy import PERIOD, SYMBOLS, Toy, ToyDraw

WORK_SCORES = {"steps": ScoreKind(lower_is_better=True), "span": ScoreKind("tokens", lower_is_better=True, digits=1)}
"""The mean number of steps (or layers) per scored token, and the mean span of all heads, if the model has them."""


class CausalTask(Task[LanguageModel]):
    """Predicts each next token of one sequence."""

    model = LanguageModel
    command = "generate"
    measured_anyway = frozenset({"causal", "causal-gradient"})

    def token_ids(self, model: LanguageModel) -> int:
        return model.embed.vocab

    def arguments(self, model: LanguageModel, inputs: Inputs) -> tuple[Any, ...]:
        return inputs.tokens, inputs.segments

    def call(
        self, model: LanguageModel, inputs: Inputs, state: State = None, *, watch: WatchFn = no_watch
    ) -> ModelOutput:
        output: ModelOutput = model(inputs.tokens, inputs.segments, state, watch=watch)
        return output

    def init_state(self, model: LanguageModel, inputs: Inputs, *, capacity: int | None = None) -> State:
        return model.init_state(inputs.tokens.shape[0], capacity=capacity)

    def batch(self, model: LanguageModel, inputs: Inputs, targets: Tensor) -> CausalLMBatch:
        return CausalLMBatch(inputs.tokens, targets, inputs.segments)

    def random_targets(self, model: LanguageModel, inputs: Inputs, generator: Generator) -> Tensor:
        return inputs.tokens.roll(-1, 1)

    def toy(self, model: LanguageModel, draw: ToyDraw) -> Toy:
        """Rows that repeat four random symbols; those of the first period cannot be predicted."""
        tokens = draw.repeated()
        targets = tokens.roll(-1, dims=1)
        targets[:, : PERIOD - 1] = IGNORE_INDEX
        targets[:, -1] = IGNORE_INDEX
        return Toy(CausalLMBatch(tokens, targets), math.log(SYMBOLS))
