"""The sentences that heads are analysed on: held-out data of a run, or a treebank; token frequencies of training."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from manyformer.data import Tokenizer
from manyformer.data.cache_folder import load_prepared
from manyformer.data.open_trees import reads_running_text
from manyformer.data.opened import EvaluationData
from manyformer.data.treebank import TreebankSentence, WordTokens, open_treebank
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import TrainedRun, task_of_run
from manyformer.heads.head_analysis import TokenFrequencies
from manyformer.heads.syntactic_heads import WordTree
from manyformer.tasks import EncodedText

SPECIAL_TOKENS = 2
"""The most tokens that a task adds to a text: one at the beginning and one at the end."""


def held_out_sentences(trained: TrainedRun, limit: int) -> Iterator[EncodedText]:
    """The first `limit` held-out sentences of a run, with their targets; of running text as many pieces, spread evenly.

    Raises UserError for data that is no plain text."""
    data = trained.load_split(None)
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
    starts = [
        (document, start)
        for document, document_length in enumerate(data.text.lengths.tolist())
        for start in range(0, document_length, length)
    ]
    for index in np.linspace(0, len(starts) - 1, min(limit, len(starts))).round().astype(int).tolist():
        document, start = starts[index]
        begin, end = (int(offset) for offset in data.text.offsets[document : document + 2])
        ids = data.text.tokens[begin + start : min(end, begin + start + length)].tolist()
        ordinary = [token for token in ids if token not in (tokenizer.pad, tokenizer.bos, tokenizer.eos)]
        yield EncodedText(ordinary, tokenizer, _token_numbers)
