"""The tasks of language models by masked diffusion, whose scores are bounds and are told as such."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Generator, Tensor
from typing_extensions import TypeVar

from manyformer.models.diffusion_lm import BlockDiffusionLM, DiffusionLM, MaskedDiffusionLM
from manyformer.models.scores import ScoreRecord, bits_per_byte, bits_per_character, perplexity
from manyformer.models.tasks.masked_language_modelling import BIDIRECTIONAL
from manyformer.models.tasks.requests import EncodedText, EvaluationRequest, EvaluationResult, TextPass
from manyformer.models.tasks.task import ScoreSums, Task, text_pass
from manyformer.models.tasks.toy import SYMBOLS, Toy, ToyDraw
from manyformer.nn.batches import NoisedBatch, TextUnits, to_device
from manyformer.nn.model_inputs import Inputs

EVALUATION_DRAWS = 16
"""The number of times that an evaluation hides tokens of each text, at levels that are spread evenly."""

NOISE_SEED = 2406
"""The seed of the random numbers of an evaluation, the same for all models."""

NO_LIKELIHOOD = {
    "cross_entropy": "its loss is a bound, in which hidden tokens alone count, each with a weight of its own",
}


D = TypeVar("D", bound=DiffusionLM, default=Any)
"""The model class of a task."""


class DiffusionTask(Task[D]):
    """Predicts the hidden tokens of a text, at every share of hidden tokens; all of its likelihoods are bounds."""

    data_forms: Mapping[str, str] = {"text": "noised"}
    bounds = frozenset({"loss", "perplexity", "bits_per_byte"})
    generates: Literal["canvas"] | None = "canvas"
    command = "generate"
    argument = '"The "'

    def token_ids(self, model: D) -> int:
        return model.embed.vocab

    def arguments(self, model: D, inputs: Inputs) -> tuple[Any, ...]:
        return inputs.tokens, inputs.segments

    def batch(self, model: D, inputs: Inputs, targets: Tensor) -> NoisedBatch:
        """A batch whose noise is the same for equal shapes."""
        generator = torch.Generator().manual_seed(NOISE_SEED)
        noise = torch.rand(*inputs.tokens.shape, 2, generator=generator).to(inputs.tokens.device)
        return NoisedBatch(inputs.tokens, targets, noise, inputs.segments)

    def random_targets(self, model: D, inputs: Inputs, generator: Generator) -> Tensor:
        return inputs.tokens

    def toy(self, model: D, draw: ToyDraw) -> Toy:
        """Rows that repeat four random symbols, of which some are hidden."""
        tokens = draw.repeated()
        noise = torch.rand(*tokens.shape, 2, generator=draw.generator).to(tokens.device)
        return Toy(NoisedBatch(tokens, tokens, noise), math.log(SYMBOLS))

    def validation(self, sums: ScoreSums, units: TextUnits | None) -> dict[str, float]:
        """The bound in nats per token, its perplexity and bits per byte, and the accuracy of hidden tokens."""
        scores = super().validation(sums, units)
        scores["accuracy"] = sums.correct / max(1.0, sums.others["hidden"])
        return scores

    def evaluate(self, request: EvaluationRequest[D]) -> EvaluationResult:
        """Bounds of perplexity and of bits per character and byte, and the accuracy of hidden tokens.

        Each text is hidden `EVALUATION_DRAWS` times by counts, with random numbers that are the same for all models."""
        sums = bound_sums(request, draws=EVALUATION_DRAWS)
        assert request.batches is not None
        units = request.batches.units
        assert units is not None
        nats = sums.nats / EVALUATION_DRAWS
        targets = sums.targets // EVALUATION_DRAWS
        hidden = int(sums.others["hidden"])
        bounds = [
            perplexity(nats, targets),
            bits_per_character(nats, units.characters),
            bits_per_byte(nats, units.bytes),
        ]
        accuracy = ScoreRecord("hidden token accuracy", 100 * sums.correct / max(1, hidden), f"hidden:{hidden}")
        description = (
            f"{targets:,} tokens in rows of {request.row_length}, hidden {EVALUATION_DRAWS} times each; what says <= "
            "is a bound"
        )
        return EvaluationResult([*map(as_bound, bounds), accuracy], description)

    def text_passes(self, model: D, text: EncodedText) -> list[TextPass]:
        return [text_pass(self, model, [text.tokenizer.bos, *text.ids, text.tokenizer.eos], text)]

    def next_commands(self, run: Path, data: object) -> tuple[str, ...]:
        return (
            f'manyformer generate {run} "The " --max-new 64 --steps 32',
            f'manyformer generate {run} "The ____ of the" --gap _',
        )


def as_bound(score: ScoreRecord) -> ScoreRecord:
    """A score of a likelihood as the bound that a diffusion has of it: the true value is at most this one."""
    signature = f"bound:above|draws:{EVALUATION_DRAWS}|{score.signature}"
    return replace(score, name=f"{score.name} <=", signature=signature)


def bound_sums(request: EvaluationRequest[Any], *, draws: int) -> ScoreSums:
    """The sums of the bound over all batches, each hidden so many times; divide nats and targets by `draws`."""
    assert request.batches is not None
    model: DiffusionLM = request.model
    sums = ScoreSums()
    for number, batch in enumerate(request.batches):
        assert isinstance(batch, NoisedBatch)
        generator = torch.Generator().manual_seed(NOISE_SEED + number)
        for draw in range(draws):
            noise = torch.rand(batch.noise.shape, generator=generator)
            # the levels of a text are spread evenly over its draws, from where the batch has them
            noise[..., 0] = (batch.noise[..., 0] + draw / draws) % 1
            sums = sums.plus(model.score(to_device(batch._replace(noise=noise), model.device)))
        request.on_progress((number + 1) / len(request.batches))
    return sums


@final
class MaskedDiffusion(DiffusionTask[MaskedDiffusionLM]):
    """Predicts hidden tokens from all others of the text, before and after them."""

    name = "masked-diffusion"
    title = "language modelling by masked diffusion"
    model = MaskedDiffusionLM
    reasons: Mapping[str, str] = {**BIDIRECTIONAL, **NO_LIKELIHOOD}


@final
class BlockDiffusion(DiffusionTask[BlockDiffusionLM]):
    """Predicts hidden tokens from their own block of the text and from the blocks before it."""

    name = "block-diffusion"
    title = "language modelling by block diffusion"
    model = BlockDiffusionLM
    reasons: Mapping[str, str] = {
        "causal": "within its block a token attends to both sides",
        "incremental_decoding": "a state holds finished blocks: no token of one can be cached before the last of it",
        "cross_attention": "it reads one sequence only",
        **NO_LIKELIHOOD,
    }


MASKED_DIFFUSION = MaskedDiffusion()
BLOCK_DIFFUSION = BlockDiffusion()
