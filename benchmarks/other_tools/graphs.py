"""Columns of tracing, compilation and export."""

import importlib.util
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from other_tools.comparisons import WrongResult, compare, compare_all
from other_tools.subject import LENGTH, ROWS, Subject, ToolLimit, ToolMissing, gradients_of, output_of, scalar_of

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
    """Training in one graph: with dropout where there is one, and without it, compared at three lengths."""
    from torch._dynamo.testing import CompileCounterWithBackend

    keywords = {"dropout": 0.1} if subject.has_keyword("dropout") else {}
    end = _end_of_graph(subject, subject.model(**keywords).train())
    torch._dynamo.reset()
    # graphs of any length divide it into other chunks, whose sums are rounded in another order
    model: Any = subject.model().double()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(model, backend=counter, fullgraph=not end)
    weights = dict(model.named_parameters())
    lengths = LENGTHS[:1] if subject.fixed_length(model) else LENGTHS
    for length in lengths:
        inputs = subject.inputs(model, length=length)
        logits = output_of(call, inputs)
        compare(logits, output_of(model, inputs), f"logits of length {length}")
        found = torch.autograd.grad(scalar_of(logits), list(weights.values()), allow_unused=True)
        zeros = {name: torch.zeros_like(w) if g is None else g for (name, w), g in zip(weights.items(), found)}
        compare_all(zeros, gradients_of(model, inputs))
    graphs = counter.frame_count
    if end:
        return f"{graphs} graphs; a graph ends at {end}"
    if graphs > 2:
        return f"{graphs} compilations for {len(lengths)} lengths"
    return None


def _end_of_graph(subject: Subject, model: nn.Module) -> str:
    """What a graph of the whole model cannot contain; "" if there is such a graph."""
    call = torch.compile(model, backend="eager", fullgraph=True)
    try:
        scalar_of(output_of(call, subject.inputs(model))).backward()
    except torch._dynamo.exc.Unsupported as error:
        function = re.search(r"<function (\S+) at", str(error))
        return function[1] if function else str(error).split("Explanation")[0].strip()
    return ""


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
        try:
            torch.onnx.export(model, inputs, file, dynamo=True, verbose=False, dynamic_shapes=shapes)
        except RuntimeError as error:
            raise _cause_of(error) from error
        session = onnxruntime.InferenceSession(file)
        others = subject.inputs(model, ROWS + 1, LENGTH + 9, seed=5)
        arrays = [x.numpy() for x in others if isinstance(x, Tensor)]
        names = [entry.name for entry in session.get_inputs()]
        found = torch.from_numpy(session.run(None, dict(zip(names, arrays)))[0])
    compare(found, output_of(model, others), "another shape")
    return None


def _cause_of(error: BaseException) -> BaseException:
    """What the exporter of ONNX met first: its own message has no word of it."""
    while error.__cause__ is not None:
        error = error.__cause__
    if str(error).startswith("No ONNX function found"):
        operator = re.search(r"op='(\S+)'", str(error))
        return ToolLimit(f"the exporter of ONNX has no function for {operator[1] if operator else 'an operator'}")
    return error


def jit_traced(subject: Subject) -> None:
    """`torch.jit.trace`, on other numbers of the same shape."""
    model = subject.model()
    inputs = subject.inputs(model)
    others = subject.inputs(model, seed=3)
    if not all(isinstance(x, Tensor) for x in inputs):
        raise ToolLimit("torch.jit.trace takes tensors alone, and an input is none")
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
