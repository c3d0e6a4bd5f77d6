"""Corruption of tokens for masked language modeling."""

import numpy as np

from manyformer.batches import IGNORE_INDEX
from manyformer.data.row_layouts import TextRows
from manyformer.data.tokenizer import Tokenizer
from manyformer.type_aliases import IntArray


def mask_tokens(
    rows: TextRows, rate: float, tokenizer: Tokenizer, random: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Corrupted tokens, and targets that are IGNORE_INDEX at unselected tokens (Devlin et al. 2019, section 3.1).

    Each ordinary token is selected with probability `rate`, at least one per row; of the selected tokens 80 % become
    mask, 10 % a random ordinary token, and 10 % are unchanged. Which tokens are ordinary and which is the mask says the
    tokenizer: its special tokens are never selected, and neither they nor placeholders without text are drawn.
    """
    ordinary = rows.is_first_copy & tokenizer.is_ordinary[rows.tokens]
    # One draw decides both: below `rate` it selects the token, and its value decides how the token is replaced.
    draw = random.random(rows.tokens.shape)
    chosen = ordinary & (draw < rate)
    for row in np.flatnonzero(ordinary.any(1) & ~chosen.any(1)):
        column = int(random.choice(np.flatnonzero(ordinary[row])))
        chosen[row, column] = True
        draw[row, column] = random.random() * rate
    tokens = rows.tokens.copy()
    tokens[chosen & (draw < 0.8 * rate)] = tokenizer.mask
    randomized = chosen & (draw >= 0.9 * rate)
    replacements = tokenizer.ordinary_ids
    tokens[randomized] = replacements[random.integers(0, len(replacements), int(randomized.sum()))]
    return tokens, np.where(chosen, rows.tokens, IGNORE_INDEX)
