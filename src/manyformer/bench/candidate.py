"""What is measured of a recipe: a forward pass, a training step, and one token more after a long text."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from manyformer.batches import (
    Batch,
    CausalLMBatch,
    ClassificationBatch,
    ImageClassificationBatch,
    MaskedLMBatch,
    Seq2SeqBatch,
    TaggingBatch,
)
from manyformer.bench.clock import TimedJob
from manyformer.core import State, tree_map
from manyformer.dependency_trees import preorder_columns
from manyformer.generate.bound import bind
from manyformer.models import EncoderDecoder, ImageClassifier, LanguageModel, MaskedLM, Tagger, TextClassifier
from manyformer.recipes import build, get_recipe

BenchKind = Literal["forward", "step", "decode"]
WHATS: tuple[BenchKind, ...] = get_args(BenchKind)

BenchPrecision = Literal["auto", "float32", "bfloat16"]

SIZES: dict[str, Any] = {"vocab": 256, "dim": 256, "depth": 4, "heads": 4, "dropout": 0.0}
"""What all recipes are built with unless told otherwise, so that they are comparable."""

NEW = 16
"""A decoding job writes this many tokens, to average over."""

MASKED = 0.15
"""The share of tokens that a masked language model has to fill in."""


class BenchCandidate(NamedTuple):
    """A recipe with keywords of its own, under the name that it has in tables and pictures."""

    label: str
    recipe: str
    keywords: dict[str, Any] = {}  # noqa: RUF012


class BenchSetting(NamedTuple):
    """What all candidates share."""

    device: torch.device
    batch: int
    max_length: int
    precision: BenchPrecision
    seed: int
    keywords: dict[str, Any]


class CandidateBench:
    """One candidate, built, with jobs to be timed. Raises UserError for unknown recipes or keywords."""

    def __init__(self, candidate: BenchCandidate, setting: BenchSetting) -> None:
        recipe = get_recipe(candidate.recipe)
        known = recipe.signature.parameters
        shared = {**SIZES, "max_length": setting.max_length + NEW, **setting.keywords}
        words = {name: value for name, value in shared.items() if name in known} | candidate.keywords
        torch.manual_seed(setting.seed)
        self.setting, self.card = setting, recipe.card
        self.model = build(candidate.recipe, **words).to(setting.device)
        self.vocab = int(self.model.spec.keywords.get("vocab", 2))
        # the fused form is the one that training uses
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.generator = torch.Generator().manual_seed(setting.seed)

    def why_not(self, what: BenchKind) -> str | None:
        """Why this cannot be measured, if it cannot."""
        if isinstance(self.model, ImageClassifier):
            return "its images are all of one size: there is no length to vary"
        if what == "decode" and not self.card.incremental_decoding:
            return self.card.reasons["incremental_decoding"]
        return None

    def job(self, what: BenchKind, length: int) -> TimedJob:
        """One run of `what` on sequences of `length` tokens."""
        if what == "decode":
            return self._decoding(length)
        batch = self._batch(length)
        return self._forward(batch) if what == "forward" else self._step(batch)

    def runs_per_job(self, what: BenchKind) -> int:
        """By what the time of a job is divided: decoding is told per token."""
        return NEW if what == "decode" else 1

    def state_bytes(self, length: int) -> int:
        """The size of what is remembered of `length` tokens."""
        sizes: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.inference_mode(), self._casting():
            tree_map(note, self._after(length, capacity=None)[1])
        return sum(sizes)

    def _forward(self, batch: Batch) -> TimedJob:
        def forward() -> None:
            self.model.eval()
            with torch.inference_mode(), self._casting():
                self.model(*_inputs(batch))

        return forward

    def _step(self, batch: Batch) -> TimedJob:
        def step() -> None:
            self.model.train()
            with self._casting():
                loss = self.model.loss(batch)
            (loss.total / loss.targets + loss.extra).backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)

        return step

    def _decoding(self, length: int) -> TimedJob:
        """`NEW` times one token, each the likeliest after the last, from the same state on every run.

        As in `generate`, what can be looked up is looked up beforehand.
        """
        model = self.model.eval()
        assert isinstance(model, LanguageModel | EncoderDecoder)
        with torch.inference_mode(), self._casting():
            first, start, memory = self._after(length, capacity=length + NEW)
            following = bind(model)

        def decode() -> Tensor:
            token, state, written = first, start, []
            with torch.inference_mode(), self._casting():
                for _ in range(NEW):
                    logits, state = following(token, state, memory)
                    token = logits.argmax(-1)
                    written.append(token)
            return torch.cat(written, dim=1)

        return decode

    def _after(self, length: int, *, capacity: int | None) -> tuple[Tensor, State, Any]:
        """The likeliest token after `length` random ones, the state there, and the encoded source if there is one."""
        model, tokens = self.model, self._tokens(length)
        assert isinstance(model, LanguageModel | EncoderDecoder)
        start, memory = model.init_state(tokens.shape[0], capacity=capacity), None
        if isinstance(model, EncoderDecoder):
            memory = model.encode(self._tokens(length))
            out = model.decode(tokens, memory, state=start)
        else:
            out = model(tokens, state=start)
        return out.logits[:, -1:].argmax(-1), out.state, memory

    def _batch(self, length: int) -> Batch:
        tokens = self._tokens(length)
        if isinstance(self.model, LanguageModel):
            return CausalLMBatch(tokens, tokens.roll(-1, 1))
        if isinstance(self.model, EncoderDecoder):
            target = self._tokens(length)
            return Seq2SeqBatch(tokens, target, target.roll(-1, 1))
        if isinstance(self.model, TextClassifier):
            return ClassificationBatch(tokens, torch.zeros_like(tokens[:, 0]))
        if isinstance(self.model, MaskedLM):
            chosen = torch.rand(tokens.shape, generator=self.generator).to(tokens.device) < MASKED
            # an empty choice would leave nothing to learn from
            chosen[:, 0] = True
            return MaskedLMBatch(tokens, torch.where(chosen, tokens, -100))
        if isinstance(self.model, Tagger):
            trees = torch.from_numpy(preorder_columns(range(length))).to(tokens.device).expand(len(tokens), -1, -1)
            return TaggingBatch(tokens, torch.zeros_like(tokens), None, trees)
        raise TypeError(f"no batches are known for {type(self.model).__name__}")

    def _tokens(self, length: int) -> Tensor:
        shape = (self.setting.batch, length)
        return torch.randint(0, self.vocab, shape, generator=self.generator).to(self.setting.device)

    def _casting(self) -> AbstractContextManager[Any]:
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.setting.device.type, torch.bfloat16)

    @property
    def precision(self) -> str:
        """What "auto" comes to: bfloat16 where there are units for it."""
        if self.setting.precision != "auto":
            return self.setting.precision
        return "bfloat16" if self.setting.device.type == "cuda" else "float32"


def _inputs(batch: Batch) -> tuple[Tensor | None, ...]:
    if isinstance(batch, TaggingBatch):
        return batch.tokens, None, batch.trees
    if isinstance(batch, ImageClassificationBatch):
        return (batch.pixels,)
    return (batch.source, batch.target) if isinstance(batch, Seq2SeqBatch) else (batch.tokens,)
