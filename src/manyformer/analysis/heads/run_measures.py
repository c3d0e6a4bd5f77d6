"""Measures of how much a trained run depends on each head, and the sentences that its heads are analyzed on.

The sentences come from its held-out data or a treebank, and the frequencies of tokens from its training text."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from manyformer.analysis.heads.attention_statistics import WordTree
from manyformer.analysis.heads.head_analysis import TokenFrequencies
from manyformer.analysis.heads.head_importance import HeadValues, ablate_heads, head_importance, normalize_layers
from manyformer.analysis.heads.relevance import head_relevance, layer_relevance
from manyformer.base.errors import UserError, suggest_names
from manyformer.data import Tokenizer
from manyformer.data.batching.epochs import HeldOutBatches
from manyformer.data.pipeline.opened import EvaluationData, EvaluationPath
from manyformer.data.rollouts import EpisodeBatch
from manyformer.data.storage.cache_folder import load_prepared
from manyformer.data.text.open_trees import reads_running_text
from manyformer.data.text.treebank import TreebankSentence, WordTokens, open_treebank
from manyformer.inference.evaluate.eval_data import TrainedRun, task_of_run
from manyformer.inference.evaluate.evaluate import score_model
from manyformer.models import Model
from manyformer.models.model import CarriedState, eval_mode
from manyformer.models.tasks import EncodedText, Inputs
from manyformer.nn.batches import Batch

LOSS = "loss"
"""The mean loss per target in nats, as a score of ablation."""

SPECIAL_TOKENS = 2
"""The most tokens that a task adds to a text: one at the beginning and one at the end."""


def importance_in_run(trained: TrainedRun, model: Model, rows: int) -> HeadValues:
    """`head_importance` over the first batches with `rows` held-out rows, divided by its norm in each layer."""
    held_out = held_out_batches(trained)
    return normalize_layers(head_importance(model, _first_rows(held_out, rows), rows_continue=held_out.rows_continue))


def ablation_in_run(
    trained: TrainedRun, model: Model, score_name: str, rows: int, *, on_head: Callable[[], None] = lambda: None
) -> HeadValues:
    """The change of a score without each head: of "loss", or of any score of the evaluation of the run.

    The first batches with `rows` held-out rows are read, or `rows` sentences. Raises UserError for an unknown score."""
    if score_name == LOSS:
        compute = _mean_loss(trained, model, rows)
    else:
        compute = _evaluation_score(trained, model, score_name, rows)
    return ablate_heads(model, compute, on_head=on_head)


def relevance_in_run(
    trained: TrainedRun, model: Model, sentences: int, *, on_sentence: Callable[[int], None] = lambda count: None
) -> HeadValues:
    """The mean of `layer_relevance` over all predictions for the first held-out sentences. Raises UserError."""
    task = task_of_run(trained.config)
    totals = dict[str, torch.Tensor]()
    predictions = 0
    for count, text in enumerate(held_out_sentences(trained, sentences), 1):
        # the last pass is that over the target, whose logits are the predictions
        target = task.text_passes(model, text)[-1]
        inputs = Inputs(torch.tensor([target.tokens], device=model.device))
        if target.source_tokens:
            inputs = inputs._replace(source=torch.tensor([target.source_tokens], device=model.device))
        relevances = head_relevance(model, inputs)
        for part, relevance in relevances.items():
            # weighted by the number of predictions, so that every token counts the same
            weighted = layer_relevance(relevance).cpu().double() * len(relevance)
            totals[part] = totals.get(part, torch.zeros(())) + weighted
        predictions += len(next(iter(relevances.values())))
        on_sentence(count)
    return {part: total / predictions for part, total in totals.items()}


def held_out_batches(trained: TrainedRun) -> HeldOutBatches:
    """The held-out batches of a run. Raises UserError for one that is scored without batches, such as a policy."""
    batches = trained.load_split(None).batches
    assert batches is not None
    if isinstance(next(iter(batches), None), EpisodeBatch):
        title = task_of_run(trained.config).title
        raise UserError(f"{title} has no held-out batches: it is scored by the episodes that it plays")
    return batches


def _first_rows(batches: HeldOutBatches, rows: int) -> Iterator[Batch]:
    """The batches up to the one that completes this number of rows."""
    count = 0
    for batch in batches:
        yield batch
        count += len(batch[0])
        if count >= rows:
            return


def _mean_loss(trained: TrainedRun, model: Model, rows: int) -> Callable[[], float]:
    held_out = held_out_batches(trained)
    # a list, because every head is scored on the same batches
    batches = list(_first_rows(held_out, rows))

    def mean_loss() -> float:
        carried = CarriedState(model, rows_continue=held_out.rows_continue)
        nats = 0.0
        targets = 0
        with torch.inference_mode(), eval_mode(model):
            for batch in batches:
                scored = carried.score(batch)
                nats += float(scored.nll)
                targets += int(scored.targets)
        return nats / max(targets, 1)

    return mean_loss


def _evaluation_score(trained: TrainedRun, model: Model, score_name: str, rows: int) -> Callable[[], float]:
    data = trained.load_split(None)
    data = data._replace(examples=data.examples[:rows])

    def score() -> float:
        with torch.inference_mode():
            result = score_model(model, trained.config, trained.tokenizers, data)
        values = {record.name: record.value for record in result.scores}
        if score_name not in values:
            raise UserError(f"there is no score '{score_name}'; {suggest_names(score_name, [LOSS, *values])}")
        return values[score_name]

    return score


def held_out_sentences(trained: TrainedRun, limit: int, file: EvaluationPath | None = None) -> Iterator[EncodedText]:
    """The first `limit` held-out sentences of a run, with their targets; of running text as many pieces, spread evenly.

    With a `file`, or two parallel ones, its sentences. Raises UserError for data that is no plain text."""
    with trained.open_data(None, file) as data:
        tokenizers = trained.tokenizers
        if data.examples:
            for example in data.examples[:limit]:
                answer = None
                if task_of_run(trained.config).takes_source:
                    answer = _encode(example.target, tokenizers.target)
                yield _encode(example.source, tokenizers.source)._replace(answer=answer)
        elif data.text is not None:
            yield from _pieces(data, tokenizers.source, trained.config.data.row_length - SPECIAL_TOKENS, limit)
        else:
            title = task_of_run(trained.config).title
            raise UserError(f"{title} reads no plain text, so there are no sentences to analyse its heads on")


def treebank_sentences(
    trained: TrainedRun, path: Path, limit: int, *, max_length: int | None
) -> Iterator[tuple[EncodedText, WordTree]]:
    """The first `limit` sentences of a CoNLL-U file, tokenized as the inputs of a run, with their trees.

    Sentences of more than `max_length` tokens are skipped. Raises UserError for a file that is not CoNLL-U."""
    tokenizers = trained.tokenizers
    takes_source = task_of_run(trained.config).takes_source
    empty_answer = None
    if takes_source:
        # a treebank has no translations; an encoder-decoder reads an empty target then
        empty_answer = _encode("", tokenizers.target)._replace(ids=[])
    tokenizer = tokenizers.source
    rows = open_treebank(str(path), "relation", trained.folder / "data").rows()
    sentences = (TreebankSentence.from_row(row) for row in rows)
    in_text = reads_running_text(trained.config.data, tokenizer)
    tokenized = ((sentence.tokens(tokenizer, in_text=in_text), sentence) for sentence in sentences)
    fitting = (
        (tokens, sentence)
        for tokens, sentence in tokenized
        if max_length is None or len(tokens.ids) + SPECIAL_TOKENS <= max_length
    )
    for tokens, sentence in islice(fitting, limit):
        text = EncodedText(tokens.ids.tolist(), tokenizer, _token_numbers, empty_answer)
        yield text, tree_of_tokens(tokens, sentence)


def tree_of_tokens(tokens: WordTokens, sentence: TreebankSentence) -> WordTree:
    """The tree of a sentence over its tokens, which a model has been trained on in the same way."""
    return WordTree(tokens.first.tolist(), sentence.labels, sentence.heads)


def token_frequencies(trained: TrainedRun) -> TokenFrequencies | None:
    """The token counts of the training text of a run; None if its prepared data is gone or belongs to another model."""
    prepared = load_prepared(trained.folder / "data")
    # counts of other token ids would be nonsense without an error
    if prepared is None or prepared.tokenizers.fingerprint != trained.tokenizers.fingerprint:
        return None
    pair = (trained.tokenizers.source, trained.tokenizers.target)
    shards = [shard for name, shard in prepared.shards.items() if name.partition(".")[0] == "train"]
    counts = [np.bincount(shard.tokens, minlength=side.vocab) for shard, side in zip(shards, pair)]
    takes_source = task_of_run(trained.config).takes_source
    return TokenFrequencies(counts[0], counts[1] if takes_source else None)


def _encode(text: str, tokenizer: Tokenizer) -> EncodedText:
    return EncodedText(tokenizer.encode(text), tokenizer, _token_numbers)


def _token_numbers(tokens: Sequence[int]) -> tuple[str, ...]:
    """Labels of tokens that are never displayed."""
    return tuple(map(str, tokens))


def _pieces(data: EvaluationData, tokenizer: Tokenizer, length: int, limit: int) -> Iterator[EncodedText]:
    """Pieces of at most `length` tokens of the documents, evenly spaced."""
    assert data.text is not None
    # every document is cut into pieces of equal length, of which some are taken evenly from all
    starts = [
        (document, start)
        for document, document_length in enumerate(data.text.lengths.tolist())
        for start in range(0, document_length, length)
    ]
    for index in np.linspace(0, len(starts) - 1, min(limit, len(starts))).round().astype(int).tolist():
        document, start = starts[index]
        begin, end = (int(offset) for offset in data.text.offsets[document : document + 2])
        ids = data.text.tokens[begin + start : min(end, begin + start + length)].tolist()
        # the task adds the special tokens of a text again
        ordinary = [token for token in ids if token not in (tokenizer.pad, tokenizer.bos, tokenizer.eos)]
        yield EncodedText(ordinary, tokenizer, _token_numbers)
