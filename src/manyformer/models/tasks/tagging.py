"""The task of assigning a label to each word of a sentence, whose dependency tree may be known."""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.models import ClassHead, EncoderModel, Tagger
from manyformer.models.scores import ScoreKind
from manyformer.models.tasks.label_task import BatchLabelTask, label_names
from manyformer.models.tasks.masked_language_modelling import EncoderHeadSettings, EncoderTask
from manyformer.models.tasks.requests import TaskTokenizers, TextPass
from manyformer.models.tasks.toy import FIRST_SYMBOL, PERIOD, SYMBOLS, Toy, ToyDraw
from manyformer.nn.batches import IGNORE_INDEX, Batch, TaggingBatch, to_device
from manyformer.nn.core import PADDING_SEGMENT
from manyformer.nn.model_inputs import Inputs
from manyformer.nn.runtime.dropout import Dropout
from manyformer.nn.runtime.torch_internals import compiler_disabled
from manyformer.nn.structures import NO_NODE, ROOT, preorder_columns


@final
class Tagging(BatchLabelTask[Tagger], EncoderTask[Tagger]):
    """Assigns a label to each word of a sentence; drawn tokens get trees that are derived from them."""

    name = "tagging"
    title = "tagging"
    model = Tagger
    data_forms: Mapping[str, str] = {"trees": "tagged"}
    argument = "FILE.conllu"
    score_kinds: Mapping[str, ScoreKind] = {"macro_f1": ScoreKind("%")}
    per_token = True
    nouns = "words, each told the tree of its sentence"

    def arguments(self, model: Tagger, inputs: Inputs) -> tuple[Any, ...]:
        return inputs.tokens, inputs.segments, trees_of_tokens(inputs.tokens, inputs.segments)

    def batch(self, model: Tagger, inputs: Inputs, targets: Tensor) -> TaggingBatch:
        return TaggingBatch(inputs.tokens, targets, inputs.segments, trees_of_tokens(inputs.tokens, inputs.segments))

    def toy(self, model: Tagger, draw: ToyDraw) -> Toy:
        """The label of a token is whether its parent, the previous token, is in the upper half of the symbols."""
        tokens = draw.symbols(2 * PERIOD)
        targets = (tokens.roll(1, 1) >= FIRST_SYMBOL + SYMBOLS // 2).long()
        targets[:, 0] = IGNORE_INDEX
        return Toy(TaggingBatch(tokens, targets, None, _chains(tokens)), math.log(2))

    def with_head(self, encoder: EncoderModel, settings: EncoderHeadSettings) -> Tagger:
        """BERT's head: dropout and a projection of every token (Devlin et al. 2019, section 5.3)."""
        dim = encoder.dim
        dropout = Dropout(encoder.embed.dropout.p)
        return Tagger(encoder.embed, encoder.body, ClassHead(dim, settings.classes, transform=dropout, bias=True))

    def read(self, model: Tagger, batch: TaggingBatch) -> tuple[Tensor, Tensor]:
        return model(batch.tokens, batch.segments, batch.trees).logits, batch.targets

    def example_pass(self, model: Tagger, batch: Batch, tokenizers: TaskTokenizers) -> TextPass:
        """The words of the first sentence, each followed by its label where it has one."""
        assert isinstance(batch, TaggingBatch)
        moved: Any = to_device(batch, model.device)
        if moved.segments is None:
            segments = torch.zeros_like(moved.tokens)
        else:
            segments = moved.segments
        # a row may hold several sentences, of which the first is shown
        length = int((segments[0] == segments[0, 0]).sum())
        tokens = moved.tokens[:1, :length]
        trees = None
        if moved.trees is not None:
            trees = moved.trees[:1, :length]
        tokenizer: Any = tokenizers.source
        names = label_names(tokenizers)
        labels = [
            f"{tokenizer.token(token)} {names[target]}" if target != IGNORE_INDEX else str(tokenizer.token(token))
            for token, target in zip(tokens[0].tolist(), moved.targets[0, :length].tolist())
        ]
        return TextPass(lambda watch: model(tokens, None, trees, watch=watch), tuple(labels), length)


@compiler_disabled
def trees_of_tokens(tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None) -> Int[Tensor, "b l 3"]:
    """A tree for each document, as columns of `preorder_columns`, that depends only on the tokens of the document.

    The first of several tokens is in no tree, as a start token is. Tokens without storage (of the meta device) get
    chains, in which the parent of each token is the previous one."""
    # models are built on the meta device to be measured, where there are no ids to derive a tree from
    if tokens.is_meta:
        return _chains(tokens)
    columns = torch.full((*tokens.shape, 3), NO_NODE)
    segment_rows = (torch.zeros_like(tokens) if segments is None else segments).tolist()
    for row, ids in enumerate(tokens.tolist()):
        for document in set(segment_rows[row]) - {PADDING_SEGMENT}:
            indices = [index for index, segment in enumerate(segment_rows[row]) if segment == document]
            nodes = indices[1:] or indices
            columns[row, nodes] = torch.from_numpy(preorder_columns(_heads([ids[index] for index in nodes])))
    return columns.to(tokens.device)


def _heads(ids: list[int]) -> list[int]:
    """The head of each token is a token before it in an order of the tokens that depends on their ids."""
    # any rule would do that makes trees of different depths, depends on the ids alone and has no cycle
    order = sorted(range(1, len(ids) + 1), key=lambda node: (ids[node - 1] * node % 7, node))
    heads = [ROOT] * len(ids)
    for rank, node in enumerate(order[1:], 1):
        # a head that comes earlier in the order: cycles are impossible
        heads[node - 1] = order[max(0, rank - 1 - ids[node - 1] % 3)]
    return heads


def _chains(tokens: Int[Tensor, "b l"]) -> Int[Tensor, "b l 3"]:
    columns = torch.from_numpy(preorder_columns(range(tokens.shape[1]))).to(tokens.device)
    return columns.expand(len(tokens), -1, -1)


TAGGING = Tagging()
