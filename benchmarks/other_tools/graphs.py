"""Columns of tracing, compilation and export."""

import importlib.util
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from other_tools.subject import (
    LENGTH,
    ROWS,
    Subject,
    ToolMissing,
    WrongResult,
    compare,
    compare_all,
    gradients_of,
    output_of,
    scalar_of,
)

LENGTHS = (LENGTH, LENGTH + 9, LENGTH + 24)


def fake(subject: Subject) -> None:
    """Built and run, forward and backward, on tensors without numbers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    plain = subject.model()
    inputs = subject.inputs(plain)
    expected = output_of(plain, inputs).shape
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        model = subject.fresh()
        faked = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in inputs]
        logits = output_of(model, tuple(faked))
        scalar_of(logits).backward()
    if logits.shape != expected:
        raise WrongResult(f"shape {tuple(logits.shape)} in place of {tuple(expected)}")


def traced_operations(subject: Subject) -> None:
    """The operations that `make_fx` records, on other numbers."""
    from torch.fx.experimental.proxy_tensor import make_fx

    model = subject.model()
    inputs = subject.inputs(model)
    others = subject.inputs(model, seed=3)
    places = [place for place, x in enumerate(inputs) if isinstance(x, Tensor)]

    def call(*tensors: Tensor) -> Tensor:
        arguments = list(inputs)
        for place, x in zip(places, tensors):
            arguments[place] = x
        return output_of(model, tuple(arguments))

    graph = make_fx(call)(*(inputs[place] for place in places))
    compare(graph(*(others[place] for place in places)), output_of(model, others), "the graph on other inputs")


def compiled(subject: Subject) -> str | None:
    """One graph in training, with dropout where there is one, at three lengths."""
    from torch._dynamo.testing import CompileCounterWithBackend

    keywords = {"dropout": 0.1} if subject.has_keyword("dropout") else {}
    model = subject.model(**keywords).train()
    counter = CompileCounterWithBackend("aot_eager")
    lengths = LENGTHS[:1] if subject.fixed_length(model) else LENGTHS
    breaks = ""
    try:
        call = torch.compile(model, backend=counter, fullgraph=True)
        for length in lengths:
            scalar_of(output_of(call, subject.inputs(model, length=length))).backward()
    except torch._dynamo.exc.Unsupported as error:
        # a place that the library takes out of graphs; anything else is an error
        if "torch.compiler.disable" not in str(error):
            raise
        breaks = str(error)
        torch._dynamo.reset()
        call = torch.compile(model, backend=counter)
        scalar_of(output_of(call, subject.inputs(model))).backward()
    graphs = counter.frame_count
    model.zero_grad()
    torch._dynamo.reset()
    plain = subject.model()
    call = torch.compile(plain, backend="aot_eager", fullgraph=not breaks)
    inputs = subject.inputs(plain)
    compare(output_of(call, inputs), output_of(plain, inputs), "logits")
    weights = list(plain.parameters())
    found = torch.autograd.grad(scalar_of(output_of(call, inputs)), weights, allow_unused=True)
    names = [name for name, _ in plain.named_parameters()]
    zeros = {n: torch.zeros_like(w) if g is None else g for n, w, g in zip(names, weights, found)}
    compare_all(zeros, gradients_of(plain, inputs))
    if breaks:
        function = re.search(r"<function (\S+) at", breaks)
        return f"{graphs} graphs, outside of which is {function[1] if function else 'a function'}"
    if graphs > 2:
        return f"{graphs} compilations for {len(lengths)} lengths"
    return None


def _dynamic_shapes(subject: Subject, model: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The batch, and the length where it is one, may be others."""
    from torch.export import Dim

    other = subject.inputs(model, ROWS + 1, LENGTH + 9, seed=5)
    shapes: list[Any] = []
    for x, y in zip(inputs, other):
        if isinstance(x, Tensor):
            shapes.append({axis: Dim.DYNAMIC for axis in range(x.ndim) if x.shape[axis] != y.shape[axis]})
        else:
            shapes.append(None)
    return tuple(shapes)


def exported(subject: Subject) -> None:
    """`torch.export` of the model itself, run at another batch and length, with gradients."""
    model = subject.model()
    inputs = subject.inputs(model)
    others = subject.inputs(model, ROWS + 1, LENGTH + 9, seed=5)
    shapes = {"dynamic_shapes": {"inputs": _dynamic_shapes(subject, model, inputs)}}
    try:
        program = torch.export.export(model, inputs, dynamic_shapes=_dynamic_shapes(subject, model, inputs))
    except torch._dynamo.exc.UserError as error:
        if "dynamic_shapes" not in str(error):
            raise
        program = torch.export.export(model, inputs, **shapes)
    module = program.module()
    compare(output_of(module, others), output_of(model, others), "another shape")
    compare_all(gradients_of(module, others), gradients_of(model, others))


def onnx(subject: Subject) -> str | None:
    """The model itself by the exporter of ONNX, run by onnxruntime at another batch and length."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise ToolMissing(f"{name} is not installed")
    import onnxruntime

    model = subject.model()
    inputs = subject.inputs(model)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "model.onnx")
        shapes = _dynamic_shapes(subject, model, inputs)
        torch.onnx.export(model, inputs, file, dynamo=True, verbose=False, dynamic_shapes=shapes)
        session = onnxruntime.InferenceSession(file)
        others = subject.inputs(model, ROWS + 1, LENGTH + 9, seed=5)
        arrays = [x.numpy() for x in others if isinstance(x, Tensor)]
        names = [entry.name for entry in session.get_inputs()]
        found = torch.from_numpy(session.run(None, dict(zip(names, arrays)))[0])
    compare(found, output_of(model, others), "another shape")
    return None


def jit_traced(subject: Subject) -> None:
    """`torch.jit.trace`, on other numbers of the same shape."""
    model = subject.model()
    inputs = subject.inputs(model)
    others = subject.inputs(model, seed=3)
    if not all(isinstance(x, Tensor) for x in inputs):
        raise ToolMissing("torch.jit.trace takes tensors alone")
    graph = torch.jit.trace(model, inputs, check_trace=False, strict=False)
    compare(graph(*others)[0], output_of(model, others), "other inputs")


COLUMNS = {
    "FakeTensor": fake,
    "make_fx": traced_operations,
    "compile": compiled,
    "export": exported,
    "ONNX": onnx,
    "jit.trace": jit_traced,
}
