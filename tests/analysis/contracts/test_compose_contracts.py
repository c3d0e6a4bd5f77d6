"""Every position with every kernel that `compose` knows: it keeps every promise, or it is refused in a sentence."""

from typing import Any

import pytest

import manyformer as mf
from manyformer.recipes import compose
from manyformer.recipes.parts.attention_kernels import PAIRWISE as PAIR_SCORES
from manyformer.recipes.parts.attention_kernels import WINDOW

APART = {"compile", "learns", "saving", "spec", "bfloat16", "float16"}
"""What has its own file, or cannot depend on the pair."""

ADDED = {"sinusoid", "learned", "none"}
TURNED = {"rope", "rope-linear", "rope-llama3", "rope-ntk", "rope-yarn"}
PAIRWISE = {"xl", "da", "alibi", "t5", "shaw", "kerple", "kerple-power", "fire", "cope", "fox", "path"}
USUAL = {"learned", "rope", "rope-dynamic", "xl", "alibi", "shaw", "kerple", "fire", "cope", "fox", "path"}
OF_PAIRS = {"softmax", "window", "strided", "fixed", "random-blocks", *PAIR_SCORES}

POSITIONS, KERNELS = tuple(compose.POSITIONS), tuple(compose.KERNELS)


def allowed(position: str, kernel: str) -> bool:
    """What the mechanisms allow: without pairs there is no score, and a summary keeps no keys that could turn again."""
    if position == "da" and kernel in ("gaussian", "laplace"):
        return False  # it multiplies the positive part of scores, and these are never positive
    if position in ("cope", "fox", "path"):
        return kernel == "softmax"  # they count every earlier token
    return position in ADDED | TURNED or kernel in OF_PAIRS or (position == "rope-dynamic" and kernel == "moba")


PAIRS = [(position, kernel) for position in POSITIONS for kernel in KERNELS if allowed(position, kernel)]


def each(pair: tuple[str, str]) -> Any:
    """One position of each kind with the plain softmax and some kernels with rotary ones every time, all when asked."""
    usual = pair in {(position, "softmax") for position in USUAL} or (
        pair[0] == "rope" and pair[1] in ("window", "linear", "cosine", "relu-mean", "gaussian")
    )
    return pytest.param(*pair, marks=() if usual else pytest.mark.slow)


def test_every_name_is_sorted() -> None:
    assert set(POSITIONS) == ADDED | TURNED | PAIRWISE | {"rope-dynamic"}


@pytest.mark.parametrize("position", POSITIONS)
def test_kernels_without_the_scores_that_a_position_changes_are_refused(position: str) -> None:
    for kernel in KERNELS:
        if not allowed(position, kernel):
            with pytest.raises(ValueError, match=r"does not support|rotates (cached )?keys"):
                mf.build("compose", vocab=11, dim=16, depth=1, heads=2, position=position, kernel=kernel)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("position", "kernel"), [each(pair) for pair in PAIRS])
def test_a_pair_keeps_every_promise(position: str, kernel: str) -> None:
    keywords: dict[str, Any] = {"position": position, "kernel": kernel}
    if position == "rope-dynamic":
        # angles change beyond this length
        keywords["max_length"] = 32
    # softmax has no chunks or windows that show in long rows alone; features of lolcats are for keys before its window
    length = {"softmax": 64, "lolcats": WINDOW + 32}.get(kernel, 112)
    if position == "learned":
        keywords["max_length"] = length
    # where the bias of a neighbour is below -1, which seeds decide, this kernel of compact support sees the token alone
    seed = 3 if (position, kernel) == ("kerple-power", "epanechnikov") else 0
    report = mf.check("compose", keywords=keywords, skip=APART, length=length, seed=seed)
    assert not [row.sentence for row in report.rows if row.verdict == "failed"]
