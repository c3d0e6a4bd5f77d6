"""Which tokens a masked language model has to fill in, and what it sees in their place."""

import numpy as np

from manyformer.batches import IGNORE_INDEX
from manyformer.data.ragged import IntArray
from manyformer.data.row_layouts import TextRows
from manyformer.data.tokenizer import SPECIALS, Tokenizer


def mask_tokens(rows: TextRows, rate: float, vocab: int, random: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Corrupted tokens, and targets that are IGNORE where nothing was chosen (Devlin et al. 2019, section 3.1).

    Each ordinary token is chosen with probability `rate`, at least one a row; of the chosen 80 % become mask, 10 % a
    random ordinary token, and 10 % stay.
    """
    ordinary = rows.is_first_copy & (rows.tokens >= len(SPECIALS))
    # One draw serves both decisions: a small number chooses a token, and how small it is what becomes of the token.
    draw = random.random(rows.tokens.shape)
    chosen = ordinary & (draw < rate)
    for row in np.flatnonzero(ordinary.any(1) & ~chosen.any(1)):
        place = int(random.choice(np.flatnonzero(ordinary[row])))
        chosen[row, place] = True
        draw[row, place] = random.random() * rate
    tokens = rows.tokens.copy()
    tokens[chosen & (draw < 0.8 * rate)] = Tokenizer.mask
    other = chosen & (draw >= 0.9 * rate)
    tokens[other] = random.integers(len(SPECIALS), vocab, int(other.sum()))
    return tokens, np.where(chosen, rows.tokens, IGNORE_INDEX)
