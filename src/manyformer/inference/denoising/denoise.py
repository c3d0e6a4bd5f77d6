"""`denoise` writes with a masked diffusion: it continues prompts, and fills the gaps of texts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import torch

from manyformer.base.errors import UserError
from manyformer.inference.denoising.filling import Canvas, Filling
from manyformer.inference.denoising.samplers import SAMPLERS
from manyformer.inference.denoising_options import DenoisingOptions
from manyformer.inference.generate.decoding import SampledChoice
from manyformer.inference.generate.prompts import (
    DEFAULT_MAX_NEW,
    Prompt,
    PromptBatch,
    check_tokens,
    pad_right,
    read_prompts,
    segments_of,
)
from manyformer.inference.generate.protocol import TokenizerProtocol
from manyformer.models import BlockDiffusionLM, DiffusionLM
from manyformer.models.model import eval_mode
from manyformer.nn.runtime.devices import float64_device


class FilledText(NamedTuple):
    """A prompt with its hidden tokens filled: all tokens but start and end, and the text; `seed` repeats it."""

    tokens: list[int]
    text: str | None
    seed: int


@dataclass(frozen=True)
class DenoisingResult:
    """The texts of each prompt, in the order of their seeds, the calls of the model, the filled tokens and the time."""

    rows: tuple[tuple[FilledText, ...], ...]
    calls: int
    filled: int
    seconds: float

    @property
    def tokens(self) -> list[list[int]]:
        """The token ids of the first text of each prompt."""
        return [row[0].tokens for row in self.rows]

    @property
    def texts(self) -> list[str]:
        """The first text of each prompt. Raises UserError where there was no tokenizer."""
        if any(row[0].text is None for row in self.rows):
            raise UserError("there is no text without a tokenizer: give tokenizer=, or read .tokens")
        return [row[0].text or "" for row in self.rows]

    @property
    def text(self) -> str:
        """The first text of the first prompt."""
        return self.texts[0]

    @property
    def statistics(self) -> str:
        """How much was filled, by how many calls of the model and in what time."""
        rate = self.filled / self.seconds if self.seconds else 0.0
        return f"{self.filled} tokens in {self.calls} calls, {self.seconds:.2f} s ({rate:.0f} tokens/s)"


def denoise(
    model: Any,
    prompts: PromptBatch,
    *,
    tokenizer: TokenizerProtocol | None = None,
    batch: int = 32,
    **options: Unpack[DenoisingOptions],
) -> DenoisingResult:
    """Continue `prompts`, or fill their gaps, with a model by masked diffusion, `batch` rows at a time.

    `prompts` is one prompt or a list of them: strings (with a `tokenizer`, which a model loaded from a run has itself),
    lists of token ids or tensors, in which the model's `mask_token` is a gap. The options are those of
    `DenoisingOptions`; what is given of a prompt stays as it is. A text ends at its first end token. The result of a
    row depends on its seed, not on the other rows. Raises UserError."""
    if not isinstance(model, DiffusionLM):
        raise UserError(
            f"a {type(model).__name__} fills no hidden tokens: denoise needs a masked diffusion, such as mdlm; "
            "mf.generate is for language models"
        )
    chosen: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    filling = read_filling(model, chosen)
    if batch < 1:
        raise UserError(f"batch must be 1 or more rows, got {batch}")
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    rows = canvas_rows(model, prompts, tokenizer, chosen.get("gap"), chosen.get("max_new"))
    samples: int = chosen.get("samples", 1)
    seeds = SampledChoice(seed=chosen.get("seed"), samples=samples).seeds(len(rows))
    repeated = [row for row in rows for _ in range(samples)]
    started = time.perf_counter()
    texts: list[FilledText] = []
    with eval_mode(model), torch.inference_mode():
        for start in range(0, len(repeated), batch):
            part = slice(start, start + batch)
            canvas = make_canvas(model, repeated[part], seeds[part], tokenizer)
            filled = filling.fill(model, canvas, use_cache=chosen.get("use_cache", True))
            texts += [
                read_text(ids[: len(row)], row, tokenizer, seed)
                for ids, row, seed in zip(filled.tolist(), repeated[part], seeds[part])
            ]
    hidden = sum(row.count(model.mask_token) for row in repeated)
    grouped = tuple(tuple(texts[start : start + samples]) for start in range(0, len(texts), samples))
    return DenoisingResult(grouped, filling.calls, hidden, time.perf_counter() - started)


def read_filling(model: DiffusionLM, options: dict[str, Any]) -> Filling:
    """How hidden tokens are filled by these options. Raises UserError for unknown ones, and for those that contradict.

    Values beyond the bounds of an option are refused as well."""
    if unknown := options.keys() - DenoisingOptions.__annotations__.keys():
        raise UserError(f"denoise has no option {min(unknown)}; it has {', '.join(DenoisingOptions.__annotations__)}")
    for name, least in (("max_new", 1), ("steps", 1), ("block", 1), ("samples", 1), ("temperature", 0)):
        if name in options and not options[name] >= least:
            raise UserError(f"{name} must be at least {least}, got {options[name]}")
    name = options.get("sampler", "ancestral")
    if name not in SAMPLERS:
        raise UserError(f"sampler must be one of {', '.join(SAMPLERS)}, got '{name}'")
    if name == "first-hitting" and "steps" in options:
        raise UserError(
            f"steps ({options['steps']}) is for other samplers: first-hitting fills one token in each; leave one out"
        )
    if isinstance(model, BlockDiffusionLM):
        if options.get("block", model.block) != model.block:
            raise UserError(f"block is {options['block']}, but the model has blocks of {model.block}; leave it out")
    elif "use_cache" in options:
        raise UserError(
            "use_cache is for a model of blocks, such as bd3-lm: here every hidden token changes all others' keys; "
            "leave it out"
        )
    return Filling(SAMPLERS[name], options.get("steps"), options.get("block"), float(options.get("temperature", 1.0)))


def canvas_rows(
    model: DiffusionLM,
    prompts: PromptBatch,
    tokenizer: TokenizerProtocol | None,
    gap: str | None,
    max_new: int | None,
) -> list[list[int]]:
    """The tokens of each prompt with mask tokens in its gaps and after it.

    Raises UserError for gaps without a tokenizer, for a model of blocks that would have to know what follows a gap, for
    rows without anything to fill, and for those beyond the model's length."""
    if gap is not None:
        prompts = with_gaps(model, prompts, tokenizer, gap)
    rows = read_prompts(prompts, tokenizer, source=False, begin=None)
    check_tokens(rows, model.embed.vocab)
    filled = []
    for index, row in enumerate(rows):
        gaps = row.count(model.mask_token)
        if gap is not None and not gaps:
            raise UserError(f"prompt {index} has no gap '{gap}'; leave gap out to continue it")
        new = max_new
        if new is None:
            capacity = DEFAULT_MAX_NEW if model.max_length is None else model.max_length - len(row)
            new = 0 if gaps else min(DEFAULT_MAX_NEW, capacity)
        if new < 1 and not gaps:
            raise UserError(f"prompt {index} has {len(row)} tokens, and the model allows no more than that: shorten it")
        if model.max_length is not None and len(row) + new > model.max_length:
            raise UserError(
                f"prompt {index} has {len(row)} tokens and max_new is {new}, but the model allows {model.max_length}"
            )
        filled.append(row + [model.mask_token] * new)
        if isinstance(model, BlockDiffusionLM):
            check_gaps_of_blocks(index, filled[-1], model)
    return filled


def check_gaps_of_blocks(index: int, row: Sequence[int], model: BlockDiffusionLM) -> None:
    """Raise UserError for a hidden token before given ones of a later block, which a model of blocks cannot see."""
    given = [column for column, token in enumerate(row) if token != model.mask_token]
    last = given[-1] // model.block if given else 0
    if any(token == model.mask_token and column // model.block < last for column, token in enumerate(row)):
        raise UserError(
            f"prompt {index} has a gap before a later block of {model.block} tokens, and a model of blocks sees none "
            "of what follows a block: a model such as mdlm fills gaps from both sides"
        )


def with_gaps(model: DiffusionLM, prompts: PromptBatch, tokenizer: TokenizerProtocol | None, gap: str) -> list[Prompt]:
    """The prompts, which are strings, as token ids with a mask token in place of each gap. Raises UserError."""
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if tokenizer is None or not gap or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"gap ('{gap}') is for prompts that are strings, with a tokenizer; in token ids a gap is the mask token "
            f"{model.mask_token}"
        )
    rows: list[Prompt] = []
    for text in texts:
        first, *others = str(text).split(gap)
        ids = list(tokenizer.encode(first))
        if tokenizer.begins_prompts or not ids:
            ids = [tokenizer.bos, *ids]
        for piece in others:
            ids += [model.mask_token, *tokenizer.encode(piece)]
        rows.append(ids)
    return rows


def make_canvas(
    model: DiffusionLM, rows: list[list[int]], seeds: Sequence[int], tokenizer: TokenizerProtocol | None
) -> Canvas:
    """The rows, padded on the right, and which tokens they may be filled with."""
    device = float64_device(model.device)
    tokens = pad_right(rows, device)
    segments = segments_of(tokens)
    is_forbidden = torch.zeros(model.embed.vocab, dtype=torch.bool, device=device)
    ends: tuple[int, ...] = ()
    if tokenizer is not None:
        # a model may have more outputs than the tokenizer has tokens
        is_forbidden[tokenizer.vocab :] = True
        ends = tuple(tokenizer.stop_ids)
        is_forbidden[[token for token in (tokenizer.pad, tokenizer.bos) if token not in ends]] = True
    is_given = (tokens != model.mask_token) & (tokens >= 0)
    columns = torch.arange(tokens.shape[1], device=device)
    last_given = torch.where(is_given, columns, -1).amax(1, keepdim=True)
    return Canvas(tokens.clamp(min=0), segments, seeds, is_forbidden, ends, last_given)


def read_text(ids: Sequence[int], row: Sequence[int], tokenizer: TokenizerProtocol | None, seed: int) -> FilledText:
    """The text of a filled row, without its start, and without what follows an end token that was filled in."""
    if tokenizer is None:
        return FilledText(list(ids), None, seed)
    ends = (column for column, token in enumerate(ids) if token in tokenizer.stop_ids and token != row[column])
    kept = list(ids[: next(ends, len(ids))])
    if kept[:1] == [tokenizer.bos]:
        kept = kept[1:]
    return FilledText(kept, tokenizer.decode(kept), seed)
