"""Find out by trial how any module computes logits from tokens: its form of call, vocabulary and lengths.

Released models are called in a handful of ways. They are tried in a fixed order, each at a few lengths, with tokens 0
and 1 alone, which every vocabulary has; the first that gives floating numbers for every token is the form.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manyformer.analysis.contracts.isolation import restoring_buffers, restoring_model_and_rng

TRIAL_LENGTHS = (48, 64, 128, 12, 256)
"""The lengths at which a form is tried: some modules want multiples of a chunk, others refuse short sequences."""

TRIAL_ROWS = 2
"""Rows in a trial: two, so that (rows, tokens, width) cannot be taken for (tokens, width)."""

LARGEST_TRIAL = 2048
"""The greatest length that is tried in search of a limit: no test uses longer sequences."""

TRIAL_SECONDS = 0.5
"""A length whose call takes longer is the last that is tried: the search must not take longer than the tests."""

POSITION_NAMES = ("start_pos", "input_pos", "pos", "position", "offset", "cache_position", "start_position", "step")
TARGET_NAMES = ("targets", "target", "labels", "y", "target_ids", "tgt", "label", "lm_labels")
LENGTH_NAMES = (
    "block_size",
    "max_seq_len",
    "max_seq_length",
    "seq_len",
    "sequence_len",
    "sequence_length",
    "context_length",
    "n_positions",
    "max_position_embeddings",
    "ctx_len",
    "n_ctx",
    "max_len",
    "max_length",
)
CONFIG_NAMES = ("config", "cfg", "args", "params", "hparams", "conf")
VOCABULARY_NAMES = ("vocab_size", "padded_vocab_size", "num_tokens", "n_vocab", "vocabulary_size")
SETUP_NAMES = ("setup_caches", "setup_cache", "set_kv_cache", "init_caches", "allocate_caches")

FormName = Literal[
    "f(x)",
    "f(x, y)",
    "f(x, y) -> loss",
    "f(x, return_loss=True)",
    "f(x, 0)",
    "f(x[:, i], i)",
    "f(x, i)",
    "f(x[:, :i])",
]

MOST_ROWS = 32
"""The number of rows up to which a limit is looked for: no test has larger batches."""


@dataclass(frozen=True)
class CallForm:
    """One way to call a module.

    `call(module, tokens, targets)` gives whatever the module gives. `reads_loss` means that the logits are not in the
    result but in the module's own call of the cross entropy. `extra_token` means that the module splits its tokens
    into inputs and targets itself, so that it gets one more. `last_alone` means that a call gives the logits of its
    last token alone, so that each prefix takes a call, which no later token ever reaches.
    """

    name: FormName
    call: Callable[[nn.Module, Tensor, Tensor], Any]
    takes_targets: bool = False
    reads_loss: bool = False
    extra_token: bool = False
    last_alone: bool = False


def _call_with_tokens(module: nn.Module, tokens: Tensor, targets: Tensor) -> Any:
    return module(tokens)


def _call_with_targets(module: nn.Module, tokens: Tensor, targets: Tensor) -> Any:
    return module(tokens, targets)


def _call_for_loss(module: nn.Module, tokens: Tensor, targets: Tensor) -> Any:
    # the last target is the token after the last input; the module shifts by itself
    return module(torch.cat([tokens, targets[:, -1:]], dim=1), return_loss=True)


def _call_from_start(module: nn.Module, tokens: Tensor, targets: Tensor) -> Any:
    return module(tokens, 0)


def _call_token_by_token(module: nn.Module, tokens: Tensor, targets: Tensor) -> Any:
    steps = [module(tokens[:, index : index + 1], index) for index in range(tokens.shape[1])]
    return torch.cat([_first_tensor(step) for step in steps], dim=1)


def _call_with_positions(module: nn.Module, tokens: Tensor, targets: Tensor) -> Any:
    set_up_caches(module, *tokens.shape)
    return module(tokens, torch.arange(tokens.shape[1], device=tokens.device))


def _call_for_each_prefix(module: nn.Module, tokens: Tensor, targets: Tensor) -> Any:
    rows = tokens.shape[0]
    logits = []
    for length in range(1, tokens.shape[1] + 1):
        tensors = floating_tensors(module(tokens[:, :length]))
        logits.append(next(t.view(rows, -1) for t in tensors if t.shape[:-1] in ((rows,), (rows, 1))))
    return torch.stack(logits, dim=1)


CALL_FORMS = (
    CallForm("f(x)", _call_with_tokens),
    CallForm("f(x, y)", _call_with_targets, takes_targets=True),
    CallForm("f(x, y) -> loss", _call_with_targets, takes_targets=True, reads_loss=True),
    CallForm("f(x, return_loss=True)", _call_for_loss, reads_loss=True, extra_token=True),
    CallForm("f(x, 0)", _call_from_start),
    CallForm("f(x[:, i], i)", _call_token_by_token),
    CallForm("f(x, i)", _call_with_positions),
    CallForm("f(x[:, :i])", _call_for_each_prefix, last_alone=True),
)


def set_up_caches(module: nn.Module, rows: int, length: int) -> None:
    """Call the module's own method that allocates its caches for these rows, if it has one."""
    for name in SETUP_NAMES:
        method = getattr(module, name, None)
        if method is None:
            continue
        required = [p for p in inspect.signature(method).parameters.values() if p.default is inspect.Parameter.empty]
        method(*(rows, length)[: len(required)])
        return


@dataclass(frozen=True)
class Attempt:
    """A form that was tried at a length, and the sentence of what went wrong."""

    form: FormName
    length: int
    reason: str
    raised: bool = False


@final
@dataclass(frozen=True)
class FoundForm:
    """How a module is called, and on what that rests.

    `width` is the number of logits of a token, `vocabulary` the number of tokens that its embedding knows.
    `vocabulary_reason` and `length_reason` name where these were found. `max_length` is None if no limit was found;
    `lengths_refused` are lengths at which the module raised. `max_rows` is the largest number of rows of a call, None
    if no limit was found, and with `fixed_rows` the only one: other numbers of rows take several calls. `target_form`
    is a form that takes targets too, if the module has one.
    """

    form: CallForm
    vocabulary: int
    vocabulary_reason: str
    width: int
    max_length: int | None
    length_reason: str
    min_length: int
    length_multiple: int
    lengths_refused: tuple[int, ...] = ()
    max_rows: int | None = None
    fixed_rows: bool = False
    target_form: CallForm | None = None

    def logits(self, module: nn.Module, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (rows, tokens, width). Raises ValueError if the module gives none of this shape."""
        form = self.form
        if targets is None:
            targets = tokens.roll(-1, dims=1)
        elif self.target_form is not None:
            form = self.target_form
        rows = tokens.shape[0]
        if self.max_rows is None or (rows <= self.max_rows and not self.fixed_rows):
            return self._logits_of(form, module, tokens, targets)
        # as many calls as it takes; the last one repeats a row where only one number of rows is taken
        if self.fixed_rows and (missing := -rows % self.max_rows):
            tokens = torch.cat([tokens, tokens[-1:].expand(missing, -1)])
            targets = torch.cat([targets, targets[-1:].expand(missing, -1)])
        groups = [slice(first, first + self.max_rows) for first in range(0, len(tokens), self.max_rows)]
        return torch.cat([self._logits_of(form, module, tokens[group], targets[group]) for group in groups])[:rows]

    def _logits_of(self, form: CallForm, module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        tensors = run_form(form, module, tokens, targets)
        logits = find_logits(tensors, tokens.shape[0], tokens.shape[1], (self.width,))
        if logits is None:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4]) or "no floating tensor"
            raise ValueError(
                f"{form.name} gave {shapes} for tokens {tuple(tokens.shape)}, not {self.width} logits each"
            )
        return logits

    def describe(self) -> list[str]:
        """What was assumed, in three lines, as a person reads it."""
        limit = "any length tried" if self.max_length is None else f"up to {self.max_length} tokens"
        multiple = "" if self.length_multiple == 1 else f", in multiples of {self.length_multiple}"
        least = "" if self.min_length <= 12 else f", at least {self.min_length}"
        rows = ""
        if self.max_rows is not None:
            rows = f", {'exactly' if self.fixed_rows else 'at most'} {self.max_rows} rows at a time"
        gives = f"{self.width} logits for each token"
        if self.form.last_alone:
            gives = f"{self.width} logits for the last token alone"
        return [
            f"called as {self.form.name}{rows}, which gives {gives}",
            f"vocabulary {self.vocabulary}: {self.vocabulary_reason}",
            f"{limit}{least}{multiple}: {self.length_reason}",
        ]


def run_form(form: CallForm, module: nn.Module, tokens: Tensor, targets: Tensor) -> list[Tensor]:
    """The floating tensors that a form gives: those in the result, or those that its cross entropy gets."""
    if not form.reads_loss:
        return list(floating_tensors(form.call(module, tokens, targets)))
    recorder = CrossEntropyInputs()
    with recorder:
        form.call(module, tokens, targets)
    return recorder.logits


def find_logits(tensors: Sequence[Tensor], rows: int, length: int, widths: Sequence[int]) -> Tensor | None:
    """The first tensor with one of these widths for every token, the widths in their order."""
    for width in widths:
        for tensor in tensors:
            if tuple(tensor.shape) == (rows, length, width):
                return tensor
        for tensor in tensors:
            if tuple(tensor.shape) == (rows * length, width):
                return tensor.view(rows, length, width)
            if tuple(tensor.shape) == (rows, width, length):
                return tensor.mT
    return None


def floating_tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
        return
    # results nest a few levels: (logits, [(keys, values), ...])
    if depth > 4:
        return
    if isinstance(value, Mapping):
        children: Sequence[Any] = list(value.values())
    elif isinstance(value, list | tuple):
        children = value
    elif is_dataclass(value) and not isinstance(value, type):
        children = [getattr(value, field.name) for field in fields(value)]
    else:
        children = []
    for child in children:
        yield from floating_tensors(child, depth + 1)


def _first_tensor(value: Any) -> Tensor:
    for tensor in floating_tensors(value):
        # (b, v) of one token
        return tensor[:, None] if tensor.ndim == 2 else tensor
    raise ValueError("a step gives no floating tensor")


class CrossEntropyInputs(TorchFunctionMode):
    """Records the logits of every cross entropy that is computed while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (nn.functional.cross_entropy, nn.functional.nll_loss):
            logits = args[0] if args else (kwargs or {}).get("input")
            if isinstance(logits, Tensor):
                self.logits.append(logits)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Lookup:
    """A table that was looked up: its number of rows, and the ids."""

    rows: int
    ids: Tensor


class TableLookups(TorchFunctionMode):
    """Records every lookup of integer ids in a table, by an embedding or by indexing, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.lookups: list[Lookup] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.embedding:
            self._record(args[0], args[1])
        elif func is nn.functional.embedding:
            self._record(args[1], args[0])
        elif func is Tensor.__getitem__ and isinstance(args[1], Tensor) and not args[1].is_floating_point():
            self._record(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _record(self, table: Any, ids: Any) -> None:
        if isinstance(table, Tensor) and isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32):
            self.lookups.append(Lookup(table.shape[0], ids.detach().clone()))


class NoFormFound(Exception):
    """No form of call gives logits for every token; `attempts` says what each raised or gave."""

    def __init__(self, module: nn.Module, attempts: Sequence[Attempt]) -> None:
        self.attempts = tuple(attempts)
        tried = "; ".join(f"{attempt.form} at {attempt.length}: {attempt.reason}" for attempt in self._telling())
        super().__init__(f"no known form of call gives logits for every token of {type(module).__name__}: {tried}")

    def _telling(self) -> list[Attempt]:
        """The first attempt of each form: at other lengths it usually raises the same."""
        return list({attempt.form: attempt for attempt in reversed(self.attempts)}.values())[::-1]


@torch.no_grad()
def find_form(module: nn.Module, *, vocabulary: int | None = None, max_length: int | None = None) -> FoundForm:
    """How `module` is called, found by trial in evaluation mode; given values are not looked for.

    Parameters, buffers and modes are left as they were. Raises NoFormFound.
    """
    with restoring_model_and_rng(module), restoring_buffers(module):
        return _FormSearch(module, vocabulary, max_length).find()


class _FormSearch:
    def __init__(self, module: nn.Module, vocabulary: int | None, max_length: int | None) -> None:
        self.module = module
        self.given_vocabulary = vocabulary
        self.given_length = max_length
        self.attempts: list[Attempt] = []
        self.rows = TRIAL_ROWS
        parameter = next(module.parameters(), torch.zeros(()))
        self.device = parameter.device
        self.named_length = named_number(module, LENGTH_NAMES)
        # an exported program says for which tokens it was exported
        self.example_shape: tuple[int, int] | None = getattr(module, "example_shape", None)

    def find(self) -> FoundForm:
        rows = [TRIAL_ROWS, 1]
        if self.example_shape is not None:
            rows.insert(1, self.example_shape[0])
        for self.rows in rows:
            for accepts_features in (False, True):
                for form in CALL_FORMS:
                    if self._may_take(form) and (found := self._try_lengths(form, accepts_features=accepts_features)):
                        return found
        raise NoFormFound(self.module, self.attempts)

    def _try_lengths(self, form: CallForm, *, accepts_features: bool) -> FoundForm | None:
        for length in self._trial_lengths():
            tried = len(self.attempts)
            found = self._try(form, length, accepts_features=accepts_features)
            if found is not None:
                found = self._with_vocabulary(found, length)
            if found is not None:
                return self._with_target_form(self._with_rows(self._with_lengths(found, length)), length)
            # what it gives at one length it gives at all
            if len(self.attempts) > tried and not self.attempts[-1].raised:
                return None
        return None

    def _with_vocabulary(self, found: FoundForm, length: int) -> FoundForm | None:
        """The form with a vocabulary all of whose tokens it takes, or None."""
        for vocabulary in sorted({found.vocabulary, min(found.vocabulary, found.width)}, reverse=True):
            generator = torch.Generator().manual_seed(length)
            tokens = torch.randint(vocabulary, (self.rows, length), generator=generator)
            tokens[0, 0] = vocabulary - 1
            try:
                found.logits(self.module, tokens.to(self.device))
            except Exception as error:
                reason = f"tokens up to {vocabulary - 1} raise {one_line(error)}"
                self.attempts.append(Attempt(found.form.name, length, reason))
                continue
            return replace(found, vocabulary=vocabulary)
        return None

    def _with_rows(self, found: FoundForm) -> FoundForm:
        """The form with the numbers of rows that it takes."""

        def runs(rows: int) -> bool:
            tokens = torch.zeros(rows, length, dtype=torch.long, device=self.device)
            try:
                found.logits(self.module, tokens)
            except Exception:
                return False
            return True

        # short, so that many rows take no longer than the other trials
        length = -(-max(found.min_length, 2) // found.length_multiple) * found.length_multiple
        if runs(MOST_ROWS):
            return found
        most = self.rows
        while most < MOST_ROWS and runs(most + 1):
            most += 1
        return replace(found, max_rows=most, fixed_rows=not runs(1))

    def _with_target_form(self, found: FoundForm, length: int) -> FoundForm:
        """The form with one that takes targets too, if the module names them."""
        if found.form.takes_targets:
            return replace(found, target_form=found.form)
        if self._second_parameter() in TARGET_NAMES:
            for form in CALL_FORMS:
                if form.takes_targets:
                    tried = self._try(form, length, accepts_features=False)
                    if tried is not None and tried.width == found.width:
                        return replace(found, target_form=form)
        return found

    def _second_parameter(self) -> str | None:
        try:
            return [*inspect.signature(self.module.forward).parameters, "", ""][1]
        except (TypeError, ValueError):
            return None

    def _may_take(self, form: CallForm) -> bool:
        """Whether the names of the parameters allow a form: a position is no target, and the other way around."""
        try:
            signature = inspect.signature(self.module.forward).parameters
        except (TypeError, ValueError):
            # a scripted module has no signature: everything is tried
            return True
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, parameter in signature.items() if parameter.kind in positional]
        takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.values())
        if form.extra_token:
            return "return_loss" in signature
        second = names[1] if len(names) > 1 else None
        takes_more = second is not None or takes_any
        if form.takes_targets:
            return takes_more and second not in POSITION_NAMES
        if form.name == "f(x)" or form.last_alone:
            return True
        return takes_more and second not in TARGET_NAMES

    def _trial_lengths(self) -> list[int]:
        limit = self.given_length
        if limit is None and self.named_length is not None:
            limit = self.named_length.value
        lengths = [length for length in TRIAL_LENGTHS if limit is None or length <= limit]
        if self.example_shape is not None:
            lengths.insert(0, self.example_shape[1])
        # some modules take sequences of their full length alone, or of more than half of it
        if limit is not None and limit <= LARGEST_TRIAL and limit not in lengths:
            lengths.append(limit)
        return lengths

    def _try(self, form: CallForm, length: int, *, accepts_features: bool) -> FoundForm | None:
        tokens = self._tokens(length)
        targets = self._tokens(length)
        lookups = TableLookups()
        try:
            with lookups:
                tensors = run_form(form, self.module, tokens, targets)
        except Exception as error:
            self.attempts.append(Attempt(form.name, length, one_line(error), raised=True))
            return None
        vocabulary, reason = self._vocabulary(lookups.lookups, tokens)
        widths = self._widths(tensors, vocabulary, accepts_features=accepts_features)
        logits = find_logits(tensors, self.rows, length, widths)
        if logits is None:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:3]) or "no floating tensor"
            self.attempts.append(Attempt(form.name, length, f"gives {shapes} for tokens {(self.rows, length)}"))
            return None
        width = logits.shape[-1]
        if vocabulary is None:
            vocabulary = width
            reason = "as many as logits, because no table that receives the tokens was seen"
        elif width < vocabulary and not accepts_features:
            reason = f"{reason}, padded: logits are {width} wide"
            vocabulary = width
        return FoundForm(form, vocabulary, reason, width, None, "", length, 1)

    def _tokens(self, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(2, (self.rows, length), generator=generator)
        return tokens.to(self.device)

    def _vocabulary(self, lookups: Sequence[Lookup], tokens: Tensor) -> tuple[int | None, str]:
        if self.given_vocabulary is not None:
            return self.given_vocabulary, "as given"
        for lookup in lookups:
            if _receives(lookup.ids, tokens):
                return lookup.rows, "the table that receives the tokens has as many rows"
        named = named_number(self.module, VOCABULARY_NAMES)
        if named is not None:
            return named.value, f"`{named.name}`"
        return None, ""

    def _widths(self, tensors: Sequence[Tensor], vocabulary: int | None, *, accepts_features: bool) -> list[int]:
        """The widths that count as logits, best first: the vocabulary, then what a padded vocabulary was cut to."""
        widths = [] if vocabulary is None else [vocabulary]
        candidates = sorted({tensor.shape[-1] for tensor in tensors if tensor.ndim >= 2}, reverse=True)
        if vocabulary is not None:
            # a vocabulary is padded to a multiple of 8 to 128 and its logits are cut back
            widths += [width for width in candidates if vocabulary - 128 < width < vocabulary and width > 1]
        if accepts_features or vocabulary is None:
            widths += [width for width in candidates if width > 1 and width not in widths]
        return widths

    def _with_lengths(self, found: FoundForm, length: int) -> FoundForm:
        """The lengths that the module takes, by its own names and by trial."""
        refused: list[int] = []

        def runs(size: int) -> bool:
            if self._try(found.form, size, accepts_features=True) is not None:
                return True
            refused.append(size)
            return False

        multiple = _multiple(runs, length)
        if self.given_length is not None:
            limit: int | None = self.given_length
            reason = "as given"
        elif self.named_length is not None and self._takes_named_length(found, multiple):
            limit = self.named_length.value
            reason = f"`{self.named_length.name}`"
        else:
            limit, reason = self._limit_by_trial(found, runs, length, multiple)
        if limit is not None:
            limit = limit // multiple * multiple
        least = _least_length(runs, length, multiple)
        return replace(
            found,
            max_length=limit,
            length_reason=reason,
            min_length=least,
            length_multiple=multiple,
            lengths_refused=tuple(sorted(set(refused))),
        )

    def _takes_named_length(self, found: FoundForm, multiple: int) -> bool:
        """Whether the module takes as many tokens as its attribute says: some of them count other things."""
        assert self.named_length is not None
        size = min(self.named_length.value, LARGEST_TRIAL) // multiple * multiple
        if size < found.min_length:
            return False
        # one row first, because this may be the longest call of all
        for rows in dict.fromkeys((1, self.rows)):
            try:
                found.logits(self.module, torch.zeros(rows, size, dtype=torch.long, device=self.device))
            except Exception:
                continue
            return True
        return False

    def _limit_by_trial(
        self, found: FoundForm, runs: Callable[[int], bool], length: int, multiple: int
    ) -> tuple[int | None, str]:
        tokens = self._tokens(length)
        lookups = TableLookups()
        with lookups:
            run_form(found.form, self.module, tokens, tokens)
        positions = torch.arange(length, device=self.device)
        for lookup in lookups.lookups:
            receives_positions = torch.equal(torch.unique(lookup.ids), positions)
            if receives_positions and lookup.rows >= length and not runs(lookup.rows + multiple):
                return lookup.rows, "the table that receives the positions has as many rows"
        largest = length
        raised = False
        while largest < LARGEST_TRIAL:
            start = time.perf_counter()
            longer = min(2 * largest, LARGEST_TRIAL)
            if not runs(longer):
                raised = True
                break
            largest = longer
            if time.perf_counter() - start > TRIAL_SECONDS:
                break
        if not raised:
            return None, f"no limit was found up to {largest}"
        # the limit is between what ran and what raised
        low = largest // multiple
        high = 2 * largest // multiple
        while high - low > 1:
            middle = (low + high) // 2
            if runs(middle * multiple):
                low = middle
            else:
                high = middle
        return low * multiple, "longer sequences raise"


def _receives(ids: Tensor, tokens: Tensor) -> bool:
    """Whether a table was looked up by these tokens, in any arrangement of rows and columns."""
    if ids.numel() != tokens.numel():
        # one token at a time, or with a token before the first: the ids are still 0 and 1 in one of the rows
        return bool(ids.numel()) and ids.ndim == 2 and ids.shape[0] == tokens.shape[0] and _begins_with(ids, tokens)
    if ids.shape == tokens.shape:
        return torch.equal(ids, tokens)
    return torch.equal(ids.flatten(), tokens.flatten()) or torch.equal(ids.flatten(), tokens.mT.flatten())


def _begins_with(ids: Tensor, tokens: Tensor) -> bool:
    length = min(ids.shape[1], tokens.shape[1])
    return torch.equal(ids[:, :length], tokens[:, :length])


def _multiple(runs: Callable[[int], bool], length: int) -> int:
    """The least power of two of which lengths must be multiples, judged next to a length that runs."""
    for multiple in (1, 2, 4, 8, 16, 32, 64, 128):
        if multiple >= length:
            return length
        if runs(length + multiple) or runs(length - multiple):
            return multiple
    return length


def _least_length(runs: Callable[[int], bool], length: int, multiple: int) -> int:
    """The least multiple that runs, if all between it and `length` do."""
    for least in (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128):
        size = -(-least // multiple) * multiple
        if size >= length:
            return length
        if runs(size):
            return size
    return length


@dataclass(frozen=True)
class NamedNumber:
    """A number that a module or its configuration holds under a known name."""

    name: str
    value: int


def named_number(module: nn.Module, names: Sequence[str]) -> NamedNumber | None:
    """The first attribute with one of these names, of the module or of the configuration that it holds."""
    holders: list[tuple[str, Any]] = [("", module)]
    for config_name in CONFIG_NAMES:
        config = getattr(module, config_name, None)
        if config is not None:
            holders.append((f"{config_name}.", config))
    for prefix, holder in holders:
        for name in names:
            value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            # a length in several levels, as of a model of patches
            if isinstance(value, tuple | list) and value and all(isinstance(part, int) for part in value):
                product = 1
                for part in value:
                    product *= part
                value = product
            if isinstance(value, int) and not isinstance(value, bool) and value > 1:
                return NamedNumber(prefix + name, value)
    return None


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
