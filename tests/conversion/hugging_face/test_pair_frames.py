"""Two texts in one row, as the tokenizer of an imported model frames them."""

import json
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import BertProcessing, RobertaProcessing

from manyformer.data.tokenizers.foreign_tokenizer import ForeignTokenizer
from manyformer.nn.batches.two_texts import frame_pair

SPECIAL = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
WORDS = {**SPECIAL, "a": 4, "b": 5, "c": 6, "d": 7}
NAMES = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>"}


@pytest.mark.parametrize("make_processor", [RobertaProcessing, BertProcessing, None])
def test_a_pair_is_framed_as_the_tokenizer_frames_it(make_processor: Any) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(list(SPECIAL))
    if make_processor is not None:
        inner.post_processor = make_processor(("</s>", 2), ("<s>", 0))
    expected = inner.encode("a b", "c d d").ids
    content = json.loads(inner.to_str())
    tokenizer = ForeignTokenizer.of_files(content, NAMES, [2])
    framed = frame_pair(tokenizer.encode("a b"), tokenizer.encode("c d d"), tokenizer, 20)
    assert framed.tokens == (expected if make_processor is not None else [0, 4, 5, 2, 6, 7, 7, 2])
    assert framed.tokens[framed.start :] == [6, 7, 7, 2]
    assert len(frame_pair([4] * 9, [5] * 9, tokenizer, 12).tokens) == 12
    assert ForeignTokenizer.restore(tokenizer.content()).pair_separators == tokenizer.pair_separators
