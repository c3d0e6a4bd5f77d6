"""The kernels of fla-core themselves, without a GPU: Triton's interpreter runs them on the CPU."""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("interpreted_fla.py")
MISSING = [name for name in ("triton", "fla") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.oracle,
    # all cases in one process; each test has the time of the whole
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} missing: pip install triton fla-core"),
]

SINGLE, HALF = 2e-6, 3e-3
"""Shares of the largest value: products of float32 and of float16."""

KINDS = {
    "none/sums/float32": SINGLE,
    "head/sums/float32": SINGLE,
    "channel/sums/float32": SINGLE,
    "none/corrects/float16": HALF,
    "head/corrects/float32": SINGLE,
    "channel/corrects/float32": SINGLE,
}
"""Each recurrence that is handed to fla-core, the most exact products that its kernels have, and their tolerance."""

REFUSED = {
    "none/corrects/float32": "ChunkDeltaRuleFunction does not support float32",
    "channel/sums/float64": "Both operands must be same dtype",
}
"""What does not run, and what is said: a refusal of the operator's own, and memories that are of float32 always."""

WRONG = "none/sums/bfloat16"
"""What runs and is wrong, in every kind: the interpreter has numbers of bfloat16 as the integers of their bits."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, float] | str]:
    """The errors of all cases, or what was said; one process for all, because it takes longer to start than to run."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), *KINDS, *REFUSED, WRONG],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        **{"capture_output": True, "text": True, "check": False},
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    results: dict[str, dict[str, float] | str] = json.loads(ended.stdout)
    if "only 0-dimensional arrays can be converted to Python scalars" in str(results[WRONG]):
        pytest.skip(f"Triton {version('triton')} cannot interpret beside numpy {version('numpy')}: it needs numpy<2.5")
    return results


@pytest.mark.parametrize("case", KINDS)
def test_outputs_memories_and_gradients_are_those_of_our_definition(case: str, outcomes: dict[str, Any]) -> None:
    assert isinstance(outcomes[case], dict), outcomes[case]
    assert max(outcomes[case].values()) < KINDS[case], outcomes[case]


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_interpreted_says_why(case: str, outcomes: dict[str, Any]) -> None:
    assert REFUSED[case] in outcomes[case]


def test_products_of_bfloat16_are_wrong_in_the_interpreter(outcomes: dict[str, Any]) -> None:
    """If this fails, the interpreter has learned them: they belong into the table above."""
    assert outcomes[WRONG]["outputs, one document"] > 1
