"""The contract that `torch.compile` does not change the outputs."""

import warnings
from typing import Any

import torch
from torch import Tensor

from manyformer.check.contract import contract
from manyformer.check.subject import seed_everything
from manyformer.check.trial import Backend, ContractFinding, ContractTrial, WorstDifference, failed
from manyformer.tasks import Inputs

TOLERANCE = 1e-4


class CountingBackend:
    """A backend of `torch.compile` that counts graphs and nodes; a function that falls back to eager has none."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.graphs, self.nodes = backend, 0, 0

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        self.graphs += 1
        self.nodes += len(graph.graph.nodes)
        return lookup_backend(self.backend)(graph, examples)


@contract("compile", "compiled == eager")
def compiled(trial: ContractTrial) -> ContractFinding:
    """Compare compiled with eager outputs for two lengths.

    The backend "aot_eager" traces and differentiates as compilation does but runs torch's operators, within seconds.
    "inductor" also generates code, which needs a C++ compiler or a GPU and up to a minute. All compiled functions of
    the process are reset, because torch stops compiling a function that it has recompiled too often.
    """
    backend, worst = CountingBackend(trial.backend), WorstDifference()

    def forward(inputs: Inputs) -> Tensor:
        return trial.subject.forward(inputs).logits

    torch.compiler.reset()
    try:
        with warnings.catch_warnings():
            # warnings about tracing are no failure
            warnings.simplefilter("ignore")
            compiled_forward = torch.compile(forward, backend=backend)
            for length in (trial.length, trial.round_length(trial.length - 1)):
                inputs = trial.draw(2, length)
                seed_everything(0)
                actual = compiled_forward(inputs)
                seed_everything(0)
                worst.add(actual, forward(inputs), f"compiled, {length} tokens")
    finally:
        torch.compiler.reset()
    if not backend.graphs:
        return failed("torch compiled no graph")
    sentence = f"{trial.backend}: {backend.graphs} graphs of {backend.nodes} nodes give the same as eager"
    return worst.finding(sentence, TOLERANCE)
