"""A cell of the matrix: one recipe in one tool, in a process of its own that cannot harm another cell."""

import contextlib
import gc
import importlib
import json
import os
import re
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from manyformer.base.errors import UserError
from manyformer.recipes import get_recipe
from other_tools import construction, graphs, loops, processes, transformations, wrappers
from other_tools.comparisons import WrongResult
from other_tools.subject import Subject, ToolLimit, ToolMissing

COLUMNS: dict[str, Callable[[Subject], str | None]] = {
    **loops.COLUMNS,
    **construction.COLUMNS,
    **transformations.COLUMNS,
    **graphs.COLUMNS,
    **wrappers.COLUMNS,
    **processes.COLUMNS,
}

IMPORTS = {
    "LoRA": ("peft", "transformers"),
    "torchao": ("torchao.quantization",),
    "compile": ("torch._functorch.aot_autograd", "torch._inductor.fx_passes.joint_graph"),
    "ONNX": ("onnxruntime", "onnxscript", "torch.onnx._internal.exporter._core"),
}
"""What these columns import, beside torch's compiler."""


def import_tools(recipes: Collection[str], columns: Collection[str]) -> None:
    """Import once what every cell would import in its own process; a tool that is missing is found there."""
    for name in recipes:
        get_recipe(name)
    names = {"torch._dynamo", *(name for column in columns for name in IMPORTS.get(column, ()))}
    for name in sorted(names):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # a collection in a process of a cell would look at all of it, and copy its pages
    gc.freeze()


class ToolCell(NamedTuple):
    """A recipe in a column."""

    recipe: str
    column: str

    def run(self, seconds: float) -> dict[str, str]:
        """The result in a process that is ended after so many seconds."""
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            # a group, to which a second process of the cell belongs
            os.setpgid(0, 0)
            os.close(reading)
            _work(self, writing)
        os.close(writing)
        text = _read(reading, seconds)
        os.close(reading)
        if text is None:
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        if text is None:
            return {"result": "slow", "words": f"not finished in {seconds:g} s"}
        if not text:
            return {"result": "error", "words": "the process died"}
        answer: dict[str, str] = json.loads(text)
        return answer

    def result(self) -> dict[str, str]:
        """The result, in this process."""
        torch.manual_seed(0)
        try:
            words = COLUMNS[self.column](Subject(self.recipe))
        except WrongResult as error:
            return {"result": "wrong", "words": str(error)}
        except ToolMissing as error:
            return {"result": "skipped", "words": str(error)}
        except (UserError, ToolLimit) as error:
            return {"result": "refused", "words": _short(str(error))}
        except Exception as error:
            if os.environ.get("TRACEBACK"):
                traceback.print_exc()
            return {"result": "error", "words": _short(f"{type(error).__name__}: {error}")}
        return {"result": "right"} | ({"words": words} if words else {})


def _work(cell: ToolCell, writing: int) -> None:
    """Compute a cell and end the process, without what a process does at its end."""
    warnings.simplefilter("ignore")
    if not os.environ.get("TRACEBACK"):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    torch.set_num_threads(1)
    try:
        os.write(writing, json.dumps(cell.result()).encode())
    finally:
        sys.stdout.flush()
        os._exit(0)


def _read(reading: int, seconds: float) -> str | None:
    """What a process writes until it ends; None if it does not."""
    ready, _, _ = select.select([reading], [], [], seconds)
    if not ready:
        return None
    return os.read(reading, 1 << 16).decode()


def _short(text: str) -> str:
    """The first words of a message, without addresses and paths of a machine."""
    line = " ".join(text.split())
    line = re.sub(r"0x[0-9a-f]+", "0x", line)
    line = re.sub(r"(/[\w.-]+)+/", "", line)
    return line[:320]
