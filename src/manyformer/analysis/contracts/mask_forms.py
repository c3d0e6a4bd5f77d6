"""Find out by trial how any module is told of padding and of several documents in a row.

A parameter's name suggests what it is for; a trial decides. A mask under which every token counts must give what the
call without it gives, and documents of equal number are one document. What else the module makes of it is tested.
"""

import inspect
import re
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.call_forms import FoundForm, one_line
from manyformer.analysis.contracts.isolation import restoring_buffers, restoring_model_and_rng
from manyformer.nn.model_inputs import PADDING_SEGMENT

SAME_TOLERANCE = 1e-4
"""The largest difference, relative to the logits, of calls that say the same in other words."""

TRIAL_LENGTH = 16

PADDING_NAMES = re.compile(
    r"((key_|src_key_|src_|tgt_key_)?padding|pad|attention|attn|att|input|token|valid)?_?mask|valid"
)
UNSPECIFIC_NAMES = ("mask", "input_mask", "token_mask")
"""Names of masks that hide tokens in models of chunks or windows too, whose borders are at fixed columns."""

DOCUMENT_NAMES = re.compile(r"(segment|document|doc|sequence|seq|packing)_?(ids?|idx|index|indices|s)")
POSITION_NAMES = re.compile(r"(position|pos)_?(id|idx)s?|positions")

MaskType = Literal["valid", "valid as integers", "padding"]


@final
@dataclass(frozen=True)
class FoundMasks:
    """The parameters of a module for padding and for documents, or the sentences why there is none.

    `mask_type` says what the padding parameter holds: which tokens are valid, or which are padding. `positions` is a
    parameter for positions that the caller counts, if the module has one.
    """

    padding: str | None
    documents: str | None
    padding_reason: str
    documents_reason: str
    mask_type: MaskType = "valid"
    positions: str | None = None

    @property
    def columns_count(self) -> bool:
        """Whether padding on the left may move the tokens after it: nothing but a name such as `mask` is known."""
        return self.padding is not None and self.documents is None and self.padding in UNSPECIFIC_NAMES

    def options(self, segments: Tensor) -> dict[str, Any]:
        """The keywords that tell the module of these segments (b, t), in which `PADDING_SEGMENT` is padding."""
        options: dict[str, Any] = {}
        valid = segments != PADDING_SEGMENT
        if self.padding is not None:
            options[self.padding] = _as_mask(valid, self.mask_type)
        if self.documents is not None:
            # numbers from 0 on in their order, and padding as a document of its own
            options[self.documents] = torch.unique(segments, return_inverse=True)[1]
        if self.positions is not None:
            options[self.positions] = _counted_positions(segments)
        return options

    def describe(self) -> str | None:
        """How the module is told of padding and documents, as a person reads it; None if it is not."""
        told = []
        if self.padding is not None:
            told.append(f"padding by {self.padding} ({self.mask_type} is True)")
        if self.documents is not None:
            told.append(f"documents by {self.documents}")
        return " and ".join(told) or None


def _as_mask(valid: Tensor, mask_type: MaskType) -> Tensor:
    if mask_type == "padding":
        return ~valid
    if mask_type == "valid as integers":
        return valid.long()
    return valid


def _counted_positions(segments: Tensor) -> Tensor:
    """The positions of tokens in their segments (b, t)."""
    columns = torch.arange(segments.shape[1], device=segments.device).expand(segments.shape)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return columns - torch.where(begins, columns, 0).cummax(1).values


class CalledWith:
    """A module whose calls get some more keywords; everything else is its own."""

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self._module = module
        self._options = options

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._module(*arguments, **keywords, **self._options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@torch.no_grad()
def find_masks(module: nn.Module, found: FoundForm) -> FoundMasks:
    """How a module whose form of call is known is told of padding and of documents."""
    nothing = FoundMasks(
        None, None, "no parameter is named as a padding mask", "no parameter is named as numbers of documents"
    )
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return nothing
    # only those that a call may leave out: the form that was found does without them
    optional = [name for name, parameter in parameters.items() if parameter.default is not inspect.Parameter.empty]
    padding_names = [name for name in optional if PADDING_NAMES.fullmatch(name)]
    document_names = [name for name in optional if DOCUMENT_NAMES.fullmatch(name)]
    if not padding_names and not document_names:
        return nothing
    with restoring_model_and_rng(module), restoring_buffers(module):
        trial = _MaskTrial(module, found)
        padding, mask_type, padding_reason = trial.find_padding(padding_names, nothing.padding_reason)
        documents, documents_reason = trial.find_documents(document_names, nothing.documents_reason)
        positions = trial.find_positions([name for name in optional if POSITION_NAMES.fullmatch(name)])
    return FoundMasks(padding, documents, padding_reason, documents_reason, mask_type, positions)


class _MaskTrial:
    def __init__(self, module: nn.Module, found: FoundForm) -> None:
        self.module = module
        self.found = found
        multiple = found.length_multiple
        length = -(-max(TRIAL_LENGTH, found.min_length) // multiple) * multiple
        if found.max_length is not None:
            length = min(length, found.max_length)
        device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(found.vocabulary, (2, length), generator=generator).to(device)
        self.plain = found.logits(module, self.tokens)
        # no power of two, as borders of chunks are
        self.half = max(length // 2 - 1, 1)

    def find_padding(self, names: list[str], reason: str) -> tuple[str | None, MaskType, str]:
        """The parameter for padding and what it holds, or why there is none."""
        all_valid = torch.ones_like(self.tokens, dtype=torch.bool)
        without_first = all_valid.clone()
        without_first[:, : self.half] = False
        types: tuple[MaskType, ...] = ("valid", "valid as integers", "padding")
        for name in names:
            for mask_type in types:
                try:
                    same = self.difference({name: _as_mask(all_valid, mask_type)})
                    masked = self.difference({name: _as_mask(without_first, mask_type)}, first=self.half)
                except Exception as error:
                    reason = f"its {name} is no mask of tokens: {one_line(error)}"
                    continue
                if same <= SAME_TOLERANCE < masked < float("inf"):
                    return name, mask_type, ""
                if same <= SAME_TOLERANCE:
                    reason = f"its {name} changes nothing"
        return None, "valid", reason

    def find_documents(self, names: list[str], reason: str) -> tuple[str | None, str]:
        """The parameter for the numbers of documents, or why there is none."""
        one = torch.zeros_like(self.tokens)
        two = one.clone()
        two[:, self.half :] = 1
        for name in names:
            try:
                same = self.difference({name: one})
                divided = self.difference({name: two}, first=self.half)
                # numbers of documents are compared and no more; an embedding of kinds of text tells 0 from 1
                renamed = self.logits({name: 1 - two}) - self.logits({name: two})
            except Exception as error:
                reason = f"its {name} takes no numbers of documents: {one_line(error)}"
                continue
            if same > SAME_TOLERANCE or self.relative(renamed) > SAME_TOLERANCE:
                reason = f"its {name} holds no numbers of documents: other numbers for the same documents change logits"
            elif divided > SAME_TOLERANCE:
                return name, ""
            else:
                reason = f"its {name} changes nothing"
        return None, reason

    def find_positions(self, names: list[str]) -> str | None:
        """The parameter for positions of each token, if one gives what the call without it gives."""
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand(self.tokens.shape)
        for name in names:
            try:
                if self.difference({name: positions}) <= SAME_TOLERANCE < self.difference({name: positions.flip(1)}):
                    return name
            except Exception:
                # a position of the whole call, as of a cache
                continue
        return None

    def logits(self, options: dict[str, Any]) -> Tensor:
        called: Any = CalledWith(self.module, options)
        return self.found.logits(called, self.tokens)

    def difference(self, options: dict[str, Any], *, first: int = 0) -> float:
        """How far the logits of the columns from `first` on are from those of a plain call, relative to the largest."""
        return self.relative((self.logits(options) - self.plain)[:, first:])

    def relative(self, difference: Tensor) -> float:
        value = float(difference.abs().max() / self.plain.abs().max().clamp(min=1e-12))
        # a NaN is no agreement
        return value if value == value else float("inf")
