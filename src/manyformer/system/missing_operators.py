"""What a device of torch does not have, operators and types of numbers, as a sentence for whoever needs one."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from manyformer.errors import UserError
from manyformer.system.devices import KINDS

# what torch says of an operator without a kernel, on MPS and elsewhere, and of float64 on MPS
_MISSING_OPERATOR = re.compile(
    r"The operator '(?P<need>[\w:.]+)' is not currently implemented for the (?P<device>\w+) device"
    r"|Could not run '(?P<other_need>[\w:.]+)' with arguments from the '(?P<other_device>\w+)' backend"
)
_MISSING_TYPE = re.compile(r"Cannot convert a (?P<device>\w+) Tensor to (?P<need>\w+) dtype")


class MissingOperator(UserError):
    """A device lacks an operator of torch, or a type of numbers, that some work needs."""


def missing_need(error: BaseException) -> tuple[str, str] | None:
    """What an error of torch says is missing, an operator or a type, and on which device; None for other errors."""
    if not isinstance(error, NotImplementedError | TypeError | RuntimeError):
        return None
    if (match := _MISSING_OPERATOR.search(str(error))) is not None:
        need = match["need"] or match["other_need"]
        device = match["device"] or match["other_device"]
        return need, device.lower()
    if (match := _MISSING_TYPE.search(str(error))) is not None:
        return match["need"], match["device"].lower()
    return None


def describe_missing(error: BaseException, subject: str) -> str | None:
    """The sentence for an error of torch about something that its device lacks and `subject` needs; else None."""
    missing = missing_need(error)
    if missing is None:
        return None
    need, device = missing
    remedy = "use the device cpu"
    kind = KINDS.get(device)
    if kind is not None and kind.fallback is not None and "::" in need:
        remedy += f", or set {kind.fallback}=1, with which torch computes it on the CPU"
    return f"the device {device} has no {need} in this version of torch, which {subject} needs; {remedy}"


@contextmanager
def report_missing_operator(subject: str) -> Iterator[None]:
    """Convert torch's errors about what a device lacks into a MissingOperator: it names what `subject` needs."""
    try:
        yield
    except (NotImplementedError, TypeError, RuntimeError) as error:
        sentence = describe_missing(error, subject)
        if sentence is None:
            raise
        raise MissingOperator(sentence) from error
