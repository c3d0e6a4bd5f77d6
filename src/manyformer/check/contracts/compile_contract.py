"""`torch.compile` changes nothing but the speed."""

import warnings
from typing import Any

import torch
from torch import Tensor

from manyformer.check.contract import contract
from manyformer.check.subject import Inputs, seed_everything
from manyformer.check.trial import Backend, ContractFinding, ContractTrial, WorstDifference, failed

TOLERANCE = 1e-4


class CountingBackend:
    """A backend of `torch.compile` that counts what it is given: what torch gave up on would prove nothing."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.graphs, self.nodes = backend, 0, 0

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        self.graphs += 1
        self.nodes += len(graph.graph.nodes)
        return lookup_backend(self.backend)(graph, examples)


@contract("compile", "compiled == eager")
def compiled(trial: ContractTrial) -> ContractFinding:
    """The backend "aot_eager" traces and differentiates as compilation does but runs torch's own operators: seconds.

    "inductor" also generates code, which needs a C++ compiler or a GPU and up to a minute. What else is compiled in
    this process will be compiled again, because torch gives up on a function that it has met too often.
    """
    backend, worst = CountingBackend(trial.backend), WorstDifference()

    def forward(inputs: Inputs) -> Tensor:
        return trial.subject.forward(inputs).logits

    torch.compiler.reset()
    try:
        with warnings.catch_warnings():
            # what torch has to say about its tracing is no broken promise
            warnings.simplefilter("ignore")
            fast = torch.compile(forward, backend=backend)
            for length in (trial.length, trial.round_length(trial.length - 1)):
                inputs = trial.draw(2, length)
                seed_everything(0)
                got = fast(inputs)
                seed_everything(0)
                worst.add(got, forward(inputs), f"compiled, {length} tokens")
    finally:
        torch.compiler.reset()
    if not backend.graphs:
        return failed("torch found nothing that it could compile")
    told = f"{trial.backend}: {backend.graphs} graphs of {backend.nodes} nodes give what eager gives"
    return worst.finding(told, TOLERANCE)
