"""The measured jobs of a recipe: a forward pass, a training step, and decoding after a long prompt."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from manyformer.bench.clock import TimedJob
from manyformer.core import State, state_bytes
from manyformer.recipes import build, get_recipe
from manyformer.recipes.registry import task_of
from manyformer.system.devices import device_kind
from manyformer.tasks import Inputs
from manyformer.train.step_job import StepJob, own_engine

BenchKind = Literal["forward", "step", "decode"]
BENCH_KINDS: tuple[BenchKind, ...] = get_args(BenchKind)

BenchPrecision = Literal["auto", "float32", "bfloat16"]

SIZES: dict[str, Any] = {"vocab": 256, "dim": 256, "depth": 4, "heads": 4, "dropout": 0.0}
"""Default keywords of all recipes, so that they are comparable."""

LEARNING_RATE = 1e-4

NEW_TOKENS = 16
"""Tokens that a decoding job generates; its time is divided by this."""


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
        self.label = candidate.label
        self.setting = setting
        self.card = recipe.card
        self.model = build(candidate.recipe, **keywords).to(setting.device)
        self.task = task_of(self.model)
        self.vocab = self.task.token_ids(self.model)
        self.engine = own_engine(self.model, autocast=None if self.precision == "float32" else torch.bfloat16)
        self.generator = torch.Generator().manual_seed(setting.seed)

    def unsupported_reason(self, kind: BenchKind) -> str | None:
        """The reason why this kind cannot be measured, or None."""
        if self.task.fixed_length(self.model) is not None:
            return "its images have a fixed size, so there is no length to vary"
        if kind == "decode":
            return self.card.reasons.get("incremental_decoding")
        return None

    def forward_decoding_note(self) -> str | None:
        """The layers that decode by `forward` because they have no faster one-token step; None if there are none."""
        if self.unsupported_reason("decode") is not None:
            return None
        layers = self.model.layers_without_step()
        names = ", ".join([*layers[:3], *(["..."] if len(layers) > 3 else [])])
        if layers:
            return f"{self.label}: decodes by forward in {names}, which have no one-token step"
        return None

    def job(self, kind: BenchKind, length: int) -> TimedJob:
        """A job that runs `kind` once on sequences of `length` tokens."""
        if kind == "decode":
            return self._decode_job(length)
        inputs = self._random_inputs(length)
        if kind == "forward":
            return self._forward_job(inputs)
        return self._step_job(inputs)

    def runs_per_job(self, kind: BenchKind) -> int:
        """The divisor of a job's time: decoding is reported per token."""
        if kind == "decode":
            return NEW_TOKENS
        return 1

    def state_bytes(self, length: int) -> int:
        """Size of the decoding state after `length` tokens, in bytes."""
        with torch.inference_mode(), self._autocast():
            return state_bytes(self._prefill(length, capacity=None)[1])

    def _forward_job(self, inputs: Inputs) -> TimedJob:
        arguments = self.task.arguments(self.model, inputs)

        def forward() -> None:
            self.model.eval()
            with torch.inference_mode(), self._autocast():
                self.model(*arguments)

        return forward

    def _step_job(self, inputs: Inputs) -> TimedJob:
        targets = self.task.random_targets(self.model, inputs, self.generator)
        batch = self.task.batch(self.model, inputs, targets)

        return StepJob(self.engine, [batch], learning_rate=LEARNING_RATE)

    def _decode_job(self, length: int) -> TimedJob:
        """Greedy decoding of `NEW_TOKENS` tokens, from the same state in every run.

        As in `generate`, the decoding function is bound beforehand.
        """
        model = self.model.eval()
        bind = self.task.one_token_step(model)
        assert bind is not None
        with torch.inference_mode(), self._autocast():
            first_token, start, memory = self._prefill(length, capacity=length + NEW_TOKENS)
            decode_token = bind()

        def decode() -> Tensor:
            token = first_token
            state = start
            generated = []
            with torch.inference_mode(), self._autocast():
                for _ in range(NEW_TOKENS):
                    logits, state = decode_token(token, state, memory)
                    token = logits.argmax(-1)
                    generated.append(token)
            return torch.cat(generated, dim=1)

        return decode

    def _prefill(self, length: int, *, capacity: int | None) -> tuple[Tensor, State, Any]:
        """The most likely token after a random prompt of `length` tokens, the state, and the encoded source if any."""
        prompt = self._random_inputs(length)
        start = self.task.init_state(self.model, prompt, capacity=capacity)
        out = self.task.call(self.model, prompt, start)
        memory, state = out.state if self.task.takes_source else (None, out.state)
        return out.logits[:, -1:].argmax(-1), state, memory

    def _random_inputs(self, length: int) -> Inputs:
        source = None
        if self.task.takes_source:
            source = self._random_tokens(length)
        return Inputs(self._random_tokens(length), source=source)

    def _random_tokens(self, length: int) -> Tensor:
        shape = (self.setting.batch, length)
        return torch.randint(0, self.vocab, shape, generator=self.generator).to(self.setting.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.setting.device.type, torch.bfloat16)

    @property
    def precision(self) -> str:
        """The precision that "auto" resolves to, as in training."""
        if self.setting.precision != "auto":
            return self.setting.precision
        kind = device_kind(self.setting.device)
        if kind.half_by_default and kind.has_bfloat16():
            return "bfloat16"
        return "float32"
