"""Sixty mutants of the strange models, each with one fault; positions, periods, layers, kinds and forms follow a seed.

A fault is a class that is put before the class of one module, so that nothing but its behavior tells it.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from strange_models import EXPERTS, FORMS, KERNEL, Config, Kind, Where, rotate
from torch import Tensor, nn

from manyformer.analysis.contracts import CheckReport, ContractRow

WITHOUT_DOCUMENTS = ("Plain", "OptionalTargets", "LossAlone", "ReturnLoss")
WITHOUT_CACHE = (*WITHOUT_DOCUMENTS, "Masked", "Packed")
IN_CHUNKS = ("FromPosition", "InputPositions", "UseCache", "ReturnedCache", "RecordedCache", "CacheAndPosition")
WITH_CACHE = (*IN_CHUNKS, "StepMethod")
WITH_TARGETS = ("OptionalTargets", "LossAlone")
POSITIONED: tuple[Kind, ...] = ("dense", "experts")
ATTENDING: tuple[Kind, ...] = ("dense", "window", "experts")
ALL: tuple[Kind, ...] = ("dense", "window", "recurrent", "convolution", "experts")


class Leak:
    """Adds a trace of what a layer reads to what it gives."""

    strength: float
    position: int
    source: int
    period: int
    length: int

    def forward(self, x: Tensor, *others: Any) -> Any:
        result = super().forward(x, *others)  # type: ignore[misc]
        if isinstance(result, tuple):
            return self.change(x, result[0]), *result[1:]
        return self.change(x, result)

    def change(self, x: Tensor, y: Tensor) -> Tensor:
        return y + self.strength * self.trace(x)

    def trace(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def next_tokens(x: Tensor) -> Tensor:
    return F.pad(x[:, 1:], (0, 0, 0, 1))


class FromOnePosition(Leak):
    def trace(self, x: Tensor) -> Tensor:
        trace = torch.zeros_like(x)
        if x.shape[1] > self.source:
            trace[:, self.position] = x[:, self.source]
        return trace


class EveryPeriod(Leak):
    def trace(self, x: Tensor) -> Tensor:
        columns = torch.arange(x.shape[1], device=x.device)
        return next_tokens(x) * (columns % self.period == self.position)[:, None]


class BlockMean(Leak):
    def trace(self, x: Tensor) -> Tensor:
        return torch.cat([part.mean(1, keepdim=True).expand_as(part) for part in x.split(self.period, dim=1)], dim=1)


class SequenceMean(Leak):
    def trace(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x)


class NextToken(Leak):
    def trace(self, x: Tensor) -> Tensor:
        return next_tokens(x)


class BelowLength(NextToken):
    def trace(self, x: Tensor) -> Tensor:
        return super().trace(x) * (x.shape[1] < self.length)


class AboveLength(NextToken):
    def trace(self, x: Tensor) -> Tensor:
        return super().trace(x) * (x.shape[1] > self.length)


class InTraining(NextToken):
    training: bool

    def trace(self, x: Tensor) -> Tensor:
        return super().trace(x) * self.training


class UnderAutocast(NextToken):
    def trace(self, x: Tensor) -> Tensor:
        return super().trace(x) * torch.is_autocast_enabled("cpu")


class SignOfFuture(Leak):
    """The sign of what follows, which has no gradient."""

    def trace(self, x: Tensor) -> Tensor:
        following = x.flip(1).cumsum(1).flip(1)
        return following.sign().detach()


class Backward(Leak):
    def trace(self, x: Tensor) -> Tensor:
        return x.flip(1).cumsum(1).flip(1) / x.shape[1]


class TopTokens(Leak):
    """An update for the quarter of the tokens with the largest scores in the whole sequence."""

    def trace(self, x: Tensor) -> Tensor:
        scores = x[..., 0]
        bar = scores.topk(max(x.shape[1] // 4, 1), dim=1).values[:, -1:]
        return x * (scores >= bar)[..., None]


class NormalizedOverTime(Leak):
    def change(self, x: Tensor, y: Tensor) -> Tensor:
        return (y - y.mean(1, keepdim=True)) / (y.var(1, keepdim=True, unbiased=False) + 0.1).sqrt()


class OneHeadUnmasked:
    head: int

    def mask(self, new: int, seen: int, where: Where) -> Tensor:
        allowed = super().mask(new, seen, where)  # type: ignore[misc]
        allowed = allowed.repeat(1, self.n_head if allowed.shape[1] == 1 else 1, 1, 1)  # type: ignore[attr-defined]
        query = torch.arange(seen - new, seen)[:, None]
        allowed[:, self.head] |= torch.arange(seen) == query + 1
        return allowed


class Centered:
    """A convolution around each token instead of before it."""

    def shift(self, padded: Tensor, lag: int, length: int) -> Tensor:
        padded = F.pad(padded, (0, 0, 0, 1))
        start = KERNEL - lag
        return padded[:, start : start + length]


class ShortTransform:
    """A transform with too little padding, which wraps around."""

    padding: int

    def transform_size(self, length: int) -> int:
        return length + min(self.padding, length // 2)


class CapacityOfSequence:
    """Each expert takes the tokens with the largest weights of the whole sequence."""

    over_batch = False

    def admit(self, weight: Tensor, choice: Tensor) -> Tensor:
        if self.over_batch:
            return self._admit(weight.flatten()[None], choice.flatten()[None]).view_as(choice)
        return self._admit(weight, choice)

    def _admit(self, weight: Tensor, choice: Tensor) -> Tensor:
        room = max(weight.shape[1] // EXPERTS, 1)
        admitted = torch.zeros_like(choice, dtype=torch.bool)
        for expert in range(EXPERTS):
            scores = weight.masked_fill(choice != expert, -1.0)
            bar = scores.topk(room, dim=1).values[:, -1:]
            admitted |= (scores >= bar) & (choice == expert)
        return admitted


class CapacityOfBatch(CapacityOfSequence):
    """Rooms in the order of the rows, so that the first rows take those of the last."""

    over_batch = True

    def _admit(self, weight: Tensor, choice: Tensor) -> Tensor:
        room = max(weight.shape[1] // EXPERTS, 1)
        ones = F.one_hot(choice, EXPERTS)
        order = (ones.cumsum(1) * ones).sum(-1)
        return order <= room


class TargetsInLogits:
    strength: float
    period: int
    position: int

    def with_targets(self, logits: Tensor, targets: Tensor) -> Tensor:
        answers = F.one_hot(targets.clamp(min=0), logits.shape[-1]).to(logits.dtype)
        columns = torch.arange(logits.shape[1]) % self.period == self.position
        return logits + self.strength * answers * columns[:, None]


class PositionOff:
    """After a prefill, positions are one too large."""

    def positions(self, tokens: Tensor, start: int, valid: Any, documents: Any) -> Tensor:
        found: Tensor = super().positions(tokens, start, valid, documents)  # type: ignore[misc]
        return (found + 1).clamp(max=self.config.block_size - 1) if start else found  # type: ignore[attr-defined]


class RotatedTwice:
    def recall(self, past: Any, where: Where) -> Any:
        length = past[0].shape[2]
        places = torch.arange(length, device=past[0].device).expand(past[0].shape[0], length)
        return rotate(past[0], places), past[1]


class KeyDropped:
    """A key is not kept once, at one position."""

    position: int

    def keep(self, k: Tensor, v: Tensor, where: Where) -> Any:
        kept = super().keep(k, v, where)  # type: ignore[misc]
        if int(where.positions[0, -1]) == self.position:
            return kept[0][:, :, :-1], kept[1][:, :, :-1]
        return kept


class WrongAfterWrap:
    """Beyond a position, the oldest keys are kept instead of the newest."""

    position: int

    def keep(self, k: Tensor, v: Tensor, where: Where) -> Any:
        size = self.window - 1  # type: ignore[attr-defined]
        if int(where.positions[0, -1]) >= self.position and k.shape[2] > size:
            return k[:, :, :size], v[:, :, :size]
        return super().keep(k, v, where)  # type: ignore[misc]


class ChunkUnmasked:
    """A chunk after others is read without a mask."""

    def mask(self, new: int, seen: int, where: Where) -> Tensor:
        allowed: Tensor = super().mask(new, seen, where)  # type: ignore[misc]
        return torch.ones_like(allowed) if 1 < new < seen else allowed


class ChunkKeepsFirst:
    """After a chunk of several tokens that follows others, a recurrence goes on from the first of them."""

    def keep(self, states: list[Tensor], past: Any, where: Where) -> Any:
        return states[-1] if past is None else states[0]


class StaleState:
    """A recurrence does not keep its state at one position."""

    position: int

    def keep(self, states: list[Tensor], past: Any, where: Where) -> Any:
        last = int(where.positions[0, -1])
        return past if past is not None and last == self.position else states[-1]


class StaleConvolution:
    """A convolution forgets its last input at one position."""

    position: int

    def keep(self, padded: Tensor, new: int, where: Where) -> Any:
        if int(where.positions[0, -1]) == self.position:
            return padded[:, -KERNEL:-1]
        return super().keep(padded, new, where)  # type: ignore[misc]


class RowsRolled:
    """From one position on, rows get the states of their neighbors."""

    position: int

    def keep(self, *arguments: Any) -> Any:
        kept = super().keep(*arguments)  # type: ignore[misc]
        if int(arguments[-1].positions[0, -1]) != self.position:
            return kept
        if isinstance(kept, tuple):
            return tuple(part.roll(1, 0) for part in kept)
        return kept.roll(1, 0)


class PaddingIgnored:
    def forward(self, x: Tensor, where: Where, past: Any = None) -> Any:
        return super().forward(x, Where(where.positions, None, where.documents), past)  # type: ignore[misc]


class ColumnsCounted:
    """Positions count columns: padding on the left moves them, and documents do not begin anew."""

    def positions(self, tokens: Tensor, start: int, valid: Any, documents: Any) -> Tensor:
        return super().positions(tokens, start, None, None)  # type: ignore[misc,no-any-return]


class BordersIgnored:
    def forward(self, x: Tensor, where: Where, past: Any = None) -> Any:
        return super().forward(x, Where(where.positions, where.valid, None), past)  # type: ignore[misc]


class NormalizedOverRows(Leak):
    def change(self, x: Tensor, y: Tensor) -> Tensor:
        return y - self.strength * y.mean(0, keepdim=True) * (y.shape[0] > 1)


class NeighborRow(Leak):
    def trace(self, x: Tensor) -> Tensor:
        return x.roll(1, 0) if x.shape[0] > 1 else torch.zeros_like(x)


class ScaledByLength(Leak):
    def change(self, x: Tensor, y: Tensor) -> Tensor:
        return y * (1 + self.strength * x.shape[1] / 64)


class CountedFromTheEnd(Leak):
    def trace(self, x: Tensor) -> Tensor:
        left = torch.arange(x.shape[1], 0, -1, device=x.device, dtype=x.dtype)
        return x * (left / 16).sin()[:, None]


class DropoutInEvaluation(Leak):
    def change(self, x: Tensor, y: Tensor) -> Tensor:
        return F.dropout(y, 0.1, training=True)


class NoiseInEvaluation(Leak):
    def trace(self, x: Tensor) -> Tensor:
        return torch.randn_like(x)


class SavedUnderOtherNames:
    """A state dict with names that the model itself does not know."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, f"{prefix}module.", keep_vars)  # type: ignore[misc]


class UnsavedTable(Leak):
    """A trained table in a plain list, which the state dict leaves out."""

    tables: list[nn.Parameter]

    def trace(self, x: Tensor) -> Tensor:
        return x * self.tables[0].to(x.dtype)


LEAKS = ("causal", "causal-training", "causal-autocast", "causal-gradient")
CACHES = ("cached", "prefill", "beams", "preallocated", "rewind")


@dataclass(frozen=True)
class Fault:
    """One kind of fault: its class, the part of the model that it is in, the models that can have it, and the
    contracts that are for it."""

    name: str
    change: type
    part: str
    kinds: Sequence[Kind]
    forms: Sequence[str]
    contracts: Sequence[str]
    times: int = 1


FAULTS = (
    Fault("leak at one position", FromOnePosition, "mixer", ALL, (*WITHOUT_CACHE, "UseCache"), LEAKS, 4),
    Fault("leak with a period", EveryPeriod, "mixer", ALL, WITHOUT_CACHE, LEAKS, 2),
    Fault("leak with a period", EveryPeriod, "mlp", ALL, WITHOUT_CACHE, LEAKS),
    Fault("mean of a block", BlockMean, "mixer", ALL, WITHOUT_CACHE, LEAKS, 2),
    Fault("mean of the sequence", SequenceMean, "mlp", ALL, WITHOUT_CACHE, LEAKS),
    Fault("mean of the sequence", SequenceMean, "mixer", ALL, ("ReturnedCache", "FromPosition"), LEAKS),
    Fault("one head unmasked", OneHeadUnmasked, "mixer", ATTENDING, WITHOUT_CACHE, LEAKS, 2),
    Fault("transform wraps around", ShortTransform, "mixer", ("convolution",), WITHOUT_DOCUMENTS, LEAKS, 2),
    Fault("leak below a length", BelowLength, "mixer", ALL, WITHOUT_CACHE, LEAKS, 2),
    Fault("leak above a length", AboveLength, "mixer", ALL, WITHOUT_CACHE, LEAKS, 2),
    Fault("leak in training", InTraining, "mixer", ALL, WITHOUT_CACHE, ("causal-training",), 2),
    Fault("leak under autocast", UnderAutocast, "mlp", ALL, WITHOUT_CACHE, ("causal-autocast",)),
    Fault("targets in logits", TargetsInLogits, "", ALL, WITH_TARGETS, ("targets",), 2),
    Fault("sign of the future", SignOfFuture, "mixer", ALL, WITHOUT_CACHE, LEAKS),
    Fault("norm over time", NormalizedOverTime, "mixer", ALL, WITHOUT_CACHE, LEAKS),
    Fault("backward pass", Backward, "mixer", ("recurrent",), WITHOUT_CACHE, LEAKS),
    Fault("centered filters", Centered, "mixer", ("convolution",), WITHOUT_CACHE, LEAKS),
    Fault("top tokens", TopTokens, "mlp", ALL, WITHOUT_CACHE, LEAKS),
    Fault("capacity of the sequence", CapacityOfSequence, "mlp", ("experts",), WITHOUT_CACHE, LEAKS),
    Fault("position off after prefill", PositionOff, "", POSITIONED, WITH_CACHE, CACHES, 2),
    Fault("keys rotated twice", RotatedTwice, "mixer", ("window",), WITH_CACHE, CACHES),
    Fault("key dropped", KeyDropped, "mixer", ATTENDING, WITH_CACHE, CACHES, 2),
    Fault("state not kept", StaleState, "mixer", ("recurrent",), WITH_CACHE, CACHES),
    Fault("input not kept", StaleConvolution, "mixer", ("convolution",), WITH_CACHE, CACHES),
    Fault("wrong after wrapping", WrongAfterWrap, "mixer", ("window",), WITH_CACHE, CACHES, 2),
    Fault("chunk unmasked", ChunkUnmasked, "mixer", ATTENDING, IN_CHUNKS, ("prefill",)),
    Fault("chunk keeps its first", ChunkKeepsFirst, "mixer", ("recurrent",), IN_CHUNKS, ("prefill",)),
    Fault("rows rolled", RowsRolled, "mixer", ALL, WITH_CACHE, CACHES, 2),
    Fault("padding ignored", PaddingIgnored, "mixer", ATTENDING, ("Masked",), ("padding-left", "padding-right"), 3),
    Fault("borders ignored", BordersIgnored, "mixer", ALL, ("Packed",), ("packing",), 2),
    Fault("positions not begun anew", ColumnsCounted, "", POSITIONED, ("Packed",), ("packing",)),
    Fault("norm over rows", NormalizedOverRows, "mixer", ALL, WITHOUT_CACHE, ("batch", "batch-training"), 2),
    Fault("reads a neighbor", NeighborRow, "mlp", ALL, WITHOUT_CACHE, ("batch", "batch-training"), 2),
    Fault("capacity of the batch", CapacityOfBatch, "mlp", ("experts",), WITHOUT_CACHE, ("batch", "batch-training")),
    Fault("scaled by length", ScaledByLength, "mixer", ALL, WITHOUT_CACHE, ("length",)),
    Fault("counted from the end", CountedFromTheEnd, "mixer", ALL, WITHOUT_CACHE, ("length",)),
    Fault("dropout in evaluation", DropoutInEvaluation, "mixer", ALL, WITHOUT_CACHE, ("seed", "repeatable")),
    Fault("noise in evaluation", NoiseInEvaluation, "mlp", ALL, WITHOUT_CACHE, ("seed", "repeatable")),
    Fault("other names when saved", SavedUnderOtherNames, "norm1", ALL, WITHOUT_CACHE, ("own-state",)),
    Fault("table not saved", UnsavedTable, "mixer", ALL, WITHOUT_CACHE, ("own-state",)),
)
"""Sixty in all, counted with their times."""


@dataclass(frozen=True)
class Mutant:
    """A model with one fault, and what a report should say of it.

    `module` is the name of the module that has the fault ("" for the whole model), `contracts` are those that are for
    it, `detail` its position, period or length in words; `build_sound` makes the same model without the fault.
    """

    name: str
    fault: str
    kind: Kind
    form: str
    module: str
    contracts: tuple[str, ...]
    detail: str
    build: Callable[[], nn.Module]
    build_sound: Callable[[], nn.Module]
    read_at: int | None = None
    """The first position whose tokens others read too early, where that is a single one."""


def draw_mutants(seed: int) -> list[Mutant]:
    """The sixty mutants of a seed."""
    draw = random.Random(seed)
    mutants: list[Mutant] = []
    used: Counter[str] = Counter()
    for fault in FAULTS:
        for _ in range(fault.times):
            # the kinds and forms of which there are the fewest so far
            kind = min(fault.kinds, key=lambda name: (used[name], draw.random()))
            form = min(fault.forms, key=lambda name: (used[name], draw.random()))
            used.update((kind, form))
            mutants.append(_mutant(f"{len(mutants):02d}", fault, kind, form, draw))
    return mutants


def _mutant(number: str, fault: Fault, kind: Kind, form: str, draw: random.Random) -> Mutant:
    depth = draw.choice((2, 3))
    config = Config(kind=kind, n_layer=depth, block_size=draw.choice((96, 128)), window=draw.choice((8, 12, 17)))
    # long filters would need the whole sequence in a cache, and know no documents
    config.long_filters = form in WITHOUT_DOCUMENTS
    layer = draw.randrange(depth)
    if fault.change is ShortTransform:
        layer = 1
    if fault.change in (Centered, BordersIgnored, StaleConvolution):
        layer = 0
    values = _values(fault, config, draw)
    module = f"blocks.{layer}.{fault.part}" if fault.part else ""
    weights = draw.randrange(1 << 30)

    def build_sound() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(weights)
            return FORMS[form](config).eval()

    def build() -> nn.Module:
        model = build_sound()
        target = model.get_submodule(module)
        plant(target, fault.change, values)
        if fault.change is UnsavedTable:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(weights)
                target.tables = [nn.Parameter(torch.randn(config.n_embd))]
        return model

    shown = {name: value for name, value in values.items() if name != "strength"}
    detail = ", ".join(f"{name} {value}" for name, value in shown.items())
    contracts = tuple(fault.contracts)
    read_at = values.get("source")
    return Mutant(number, fault.name, kind, form, module, contracts, detail, build, build_sound, read_at)


def _values(fault: Fault, config: Config, draw: random.Random) -> dict[str, Any]:
    """The position, period, length and strength of a fault."""
    values: dict[str, Any] = {}
    if issubclass(fault.change, (Leak, TargetsInLogits)):
        values["strength"] = draw.choice((1.0, 0.3, 0.05))
    if fault.change is FromOnePosition:
        values["source"] = draw.randrange(1, 60)
        values["position"] = draw.randrange(values["source"])
    elif fault.change in (EveryPeriod, TargetsInLogits):
        values["period"] = draw.randrange(2, 24)
        values["position"] = draw.randrange(values["period"])
    elif fault.change is BlockMean:
        values["period"] = draw.randrange(3, 33)
    elif fault.change is BelowLength:
        values["length"] = draw.randrange(16, 60)
    elif fault.change is AboveLength:
        values["length"] = draw.randrange(64, config.block_size - 8)
    elif fault.change is ShortTransform:
        values["padding"] = draw.randrange(20)
    elif fault.change is OneHeadUnmasked:
        values["head"] = draw.randrange(config.n_head)
    elif fault.change in (KeyDropped, StaleState, StaleConvolution, RowsRolled):
        values["position"] = draw.randrange(14, 40)
    elif fault.change is WrongAfterWrap:
        values["position"] = draw.randrange(20, 40)
    return values


def plant(module: nn.Module, fault: type, values: dict[str, Any]) -> None:
    """Put a fault into a module, which keeps the name of its class."""
    original = type(module)
    module.__class__ = type(original.__name__, (fault, original), {"__module__": original.__module__})
    for name, value in values.items():
        setattr(module, name, value)


def names_place(report: CheckReport, mutant: Mutant) -> bool:
    """Whether a red row of a contract that is for the fault names it, for leaks with its module and position."""
    rows = [row for row in report.failed if row.contract in mutant.contracts]
    if mutant.contracts != LEAKS:
        return bool(rows)
    return any(_names_module(row, mutant) and _names_position(row, mutant) for row in rows)


def _names_module(row: ContractRow, mutant: Mutant) -> bool:
    """Whether the module of a row's place is that of the fault, or a part of it."""
    if row.place is None or row.place.module is None:
        return False
    return f"{row.place.module}.".startswith(f"{mutant.module}.")


def _names_position(row: ContractRow, mutant: Mutant) -> bool:
    return mutant.read_at is None or (row.place is not None and row.place.token == mutant.read_at)
