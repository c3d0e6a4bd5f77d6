"""The measured jobs of a recipe: a forward pass, a training step, and decoding after a long prompt."""

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
BENCH_KINDS: tuple[BenchKind, ...] = get_args(BenchKind)

BenchPrecision = Literal["auto", "float32", "bfloat16"]

SIZES: dict[str, Any] = {"vocab": 256, "dim": 256, "depth": 4, "heads": 4, "dropout": 0.0}
"""Default keywords of all recipes, so that they are comparable."""

NEW_TOKENS = 16
"""Tokens that a decoding job generates; its time is divided by this."""

MASKED_SHARE = 0.15
"""The share of tokens that a masked language model predicts."""


class BenchCandidate(NamedTuple):
    """A recipe with its own keywords, and its label in tables and pictures."""

    label: str
    recipe: str
    keywords: dict[str, Any] = {}  # noqa: RUF012


class BenchSetting(NamedTuple):
    """Settings shared by all candidates."""

    device: torch.device
    batch: int
    max_length: int
    precision: BenchPrecision
    seed: int
    keywords: dict[str, Any]


class CandidateBench:
    """One candidate's model and its jobs. Raises UserError for unknown recipes or keywords."""

    def __init__(self, candidate: BenchCandidate, setting: BenchSetting) -> None:
        recipe = get_recipe(candidate.recipe)
        parameters = recipe.signature.parameters
        shared = {**SIZES, "max_length": setting.max_length + NEW_TOKENS, **setting.keywords}
        keywords = {name: value for name, value in shared.items() if name in parameters} | candidate.keywords
        torch.manual_seed(setting.seed)
        self.setting, self.card = setting, recipe.card
        self.model = build(candidate.recipe, **keywords).to(setting.device)
        self.vocab = int(self.model.spec.keywords.get("vocab", 2))
        # fused, as in training
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.generator = torch.Generator().manual_seed(setting.seed)

    def unsupported_reason(self, kind: BenchKind) -> str | None:
        """The reason why this kind cannot be measured, or None."""
        if isinstance(self.model, ImageClassifier):
            return "its images have a fixed size, so there is no length to vary"
        if kind == "decode" and not self.card.incremental_decoding:
            return self.card.reasons["incremental_decoding"]
        return None

    def job(self, kind: BenchKind, length: int) -> TimedJob:
        """A job that runs `kind` once on sequences of `length` tokens."""
        if kind == "decode":
            return self._decode_job(length)
        batch = self._make_batch(length)
        return self._forward_job(batch) if kind == "forward" else self._step_job(batch)

    def runs_per_job(self, kind: BenchKind) -> int:
        """The divisor of a job's time: decoding is reported per token."""
        return NEW_TOKENS if kind == "decode" else 1

    def state_bytes(self, length: int) -> int:
        """Size of the decoding state after `length` tokens, in bytes."""
        sizes: list[int] = []

        def record(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.inference_mode(), self._autocast():
            tree_map(record, self._prefill(length, capacity=None)[1])
        return sum(sizes)

    def _forward_job(self, batch: Batch) -> TimedJob:
        def forward() -> None:
            self.model.eval()
            with torch.inference_mode(), self._autocast():
                self.model(*_inputs(batch))

        return forward

    def _step_job(self, batch: Batch) -> TimedJob:
        def step() -> None:
            self.model.train()
            with self._autocast():
                loss = self.model.loss(batch)
            (loss.total / loss.targets + loss.extra).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

        return step

    def _decode_job(self, length: int) -> TimedJob:
        """Greedy decoding of `NEW_TOKENS` tokens, from the same state in every run.

        As in `generate`, the decoding function is bound beforehand.
        """
        model = self.model.eval()
        assert isinstance(model, LanguageModel | EncoderDecoder)
        with torch.inference_mode(), self._autocast():
            first_token, start, memory = self._prefill(length, capacity=length + NEW_TOKENS)
            decode_token = bind(model)

        def decode() -> Tensor:
            token, state, generated = first_token, start, []
            with torch.inference_mode(), self._autocast():
                for _ in range(NEW_TOKENS):
                    logits, state = decode_token(token, state, memory)
                    token = logits.argmax(-1)
                    generated.append(token)
            return torch.cat(generated, dim=1)

        return decode

    def _prefill(self, length: int, *, capacity: int | None) -> tuple[Tensor, State, Any]:
        """The most likely token after a random prompt of `length` tokens, the state, and the encoded source if any."""
        model, tokens = self.model, self._random_tokens(length)
        assert isinstance(model, LanguageModel | EncoderDecoder)
        start, memory = model.init_state(tokens.shape[0], capacity=capacity), None
        if isinstance(model, EncoderDecoder):
            memory = model.encode(self._random_tokens(length))
            out = model.decode(tokens, memory, state=start)
        else:
            out = model(tokens, state=start)
        return out.logits[:, -1:].argmax(-1), out.state, memory

    def _make_batch(self, length: int) -> Batch:
        tokens = self._random_tokens(length)
        if isinstance(self.model, LanguageModel):
            return CausalLMBatch(tokens, tokens.roll(-1, 1))
        if isinstance(self.model, EncoderDecoder):
            target = self._random_tokens(length)
            return Seq2SeqBatch(tokens, target, target.roll(-1, 1))
        if isinstance(self.model, TextClassifier):
            return ClassificationBatch(tokens, torch.zeros_like(tokens[:, 0]))
        if isinstance(self.model, MaskedLM):
            masked = torch.rand(tokens.shape, generator=self.generator).to(tokens.device) < MASKED_SHARE
            # without a masked token there would be no loss
            masked[:, 0] = True
            return MaskedLMBatch(tokens, torch.where(masked, tokens, -100))
        if isinstance(self.model, Tagger):
            trees = torch.from_numpy(preorder_columns(range(length))).to(tokens.device).expand(len(tokens), -1, -1)
            return TaggingBatch(tokens, torch.zeros_like(tokens), None, trees)
        raise TypeError(f"cannot make a benchmark batch for {type(self.model).__name__}")

    def _random_tokens(self, length: int) -> Tensor:
        shape = (self.setting.batch, length)
        return torch.randint(0, self.vocab, shape, generator=self.generator).to(self.setting.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.setting.device.type, torch.bfloat16)

    @property
    def precision(self) -> str:
        """The precision that "auto" resolves to: bfloat16 on CUDA, else float32."""
        if self.setting.precision != "auto":
            return self.setting.precision
        return "bfloat16" if self.setting.device.type == "cuda" else "float32"


def _inputs(batch: Batch) -> tuple[Tensor | None, ...]:
    if isinstance(batch, TaggingBatch):
        return batch.tokens, None, batch.trees
    if isinstance(batch, ImageClassificationBatch):
        return (batch.pixels,)
    if isinstance(batch, Seq2SeqBatch):
        return batch.source, batch.target
    assert isinstance(batch, CausalLMBatch | MaskedLMBatch | ClassificationBatch)
    return (batch.tokens,)
