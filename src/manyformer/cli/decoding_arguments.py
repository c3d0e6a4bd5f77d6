"""The options of decoding as options of a command."""

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

from annotated_types import Ge, Le
from typer import Option

from manyformer.cli.app import F
from manyformer.decoding_options import DecodingOptions

ALIASES = {"max_new": ("--max-new", "--length"), "crop": ("--crop",)}


def decoding_option(name: str, note: str = "") -> Any:
    """The command-line option for one of the `DecodingOptions`, with its bounds and meaning; `note` ends the help."""
    *metadata, meaning = DecodingOptions.__annotations__[name].__metadata__
    minimum: Any = next((bound.ge for bound in metadata if isinstance(bound, Ge)), None)
    maximum: Any = next((bound.le for bound in metadata if isinstance(bound, Le)), None)
    return Option(*ALIASES.get(name, ()), min=minimum, max=maximum, help=f"{meaning} {note}".strip())


def decoding_options(*names: str, **notes: str) -> Callable[[F], F]:
    """Replace a command's parameter `**decoding: Unpack[DecodingOptions]` by these options; `notes` end their helps."""
    types: dict[str, Any] = {**get_type_hints(DecodingOptions), "stop": list[str] | None}

    def option(name: str) -> Parameter:
        annotation = Annotated[types[name], decoding_option(name, notes.get(name, ""))]  # type: ignore[valid-type]
        return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def expand(function: F) -> F:
        parameters = list(inspect.signature(function).parameters.values())[:-1]
        first = sum(parameter.kind is not Parameter.KEYWORD_ONLY for parameter in parameters)
        parameters[first:first] = map(option, names)
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return function

    return expand
