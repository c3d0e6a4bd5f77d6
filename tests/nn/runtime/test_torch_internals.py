"""Private names of torch are reached in one file, which the package does without where a release lacks them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import manyformer as mf
from manyformer.nn.runtime import torch_internals

ROOT = Path(mf.__file__).parent

HIDDEN = """
import sys, importlib.abc

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {names!r}:
            raise ImportError(f"{{name}} is hidden")

sys.meta_path.insert(0, Hidden())
import torch
for name in {names!r}:
    sys.modules.pop(name, None)
"""


def private_names_of_torch(path: Path) -> list[str]:
    """The private modules of torch that a file imports or reads."""
    names = re.findall(r"\btorch(?:\.\w+)*\._\w+(?:\.\w+)*", path.read_text(encoding="utf-8"))
    return [name for name in names if re.match(r"torch\.(\w+\.)*_[a-z]", name, re.IGNORECASE)]


def test_private_names_of_torch_stand_in_one_file() -> None:
    found = {path: private_names_of_torch(path) for path in ROOT.rglob("*.py") if path.name != "torch_internals.py"}
    # operators have underscores, too; whether torch has them is asked in the same file, or they are looked up by name
    operators = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"
    others = {
        str(path.relative_to(ROOT)): [name for name in names if not name.startswith(operators)]
        for path, names in found.items()
    }
    assert {path: names for path, names in others.items() if names} == {}


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "hidden",
    [["torch._C._dynamo.eval_frame"], ["torch._dynamo.backends.registry"]],
)
def test_the_package_works_where_a_private_module_is_missing(hidden: list[str]) -> None:
    """A model is built, learns and decodes, in a process whose torch does not have the module."""
    code = HIDDEN.format(names=hidden) + (
        "import manyformer as mf\n"
        "from manyformer.nn.batches import CausalLMBatch\n"
        "model = mf.build('longformer-lm', vocab=50, dim=16, depth=1, heads=2, window=8)\n"
        "tokens = torch.randint(0, 50, (1, 40))\n"
        "model.loss(CausalLMBatch(tokens, tokens)).total.backward()\n"
        "assert all(p.grad is not None for p in model.parameters())\n"
        "assert len(mf.generate(model.eval(), [[1, 2, 3]], max_new=3).tokens[0]) <= 3\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_more_variants_than_eight_are_compiled_where_they_are_asked_for() -> None:
    """Torch stops at eight variants of a function; within `compile_up_to` it goes on."""

    def scale(x: torch.Tensor, factor: int) -> torch.Tensor:
        return x * factor

    graphs = []

    def count(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(scale, backend=count, fullgraph=True, dynamic=False)
    with torch_internals.compile_up_to(12):
        for length in range(2, 14):
            assert float(compiled(torch.ones(length), 2).sum()) == 2 * length
    torch.compiler.reset()
    assert len(graphs) == 12


def test_a_backend_is_found_by_its_name() -> None:
    backend = torch_internals.compiler_backend("aot_eager")
    assert backend is not None
    graph = torch.fx.symbolic_trace(lambda x: (x + 1,))
    assert float(backend(graph, [torch.zeros(())])(torch.zeros(()))[0]) == 1
