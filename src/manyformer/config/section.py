"""The base of all sections of a run: frozen, strict, without unknown settings, with conflicts between settings."""

from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

MAX_INT = (1 << 63) - 1
"""The largest whole number in a run: what a seed, a counter or a size of torch can be."""


class SettingConflict(NamedTuple):
    """A conflict between settings: the path of the wrong one, the message, and the dotted names of the others."""

    path: tuple[str, ...]
    message: str
    other_settings: tuple[str, ...] = ()


class ConfigSection(BaseModel):
    """A frozen group of settings; the docstring under a field is its help."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @classmethod
    def fill(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Fill in defaults that depend on other settings."""
        return settings

    def conflicts(self) -> Iterable[SettingConflict]:
        """Conflicts between the settings of this section; empty if there are none."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, settings: Any) -> Any:
        if isinstance(settings, dict):
            return cls.fill(dict(settings))
        return settings

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        errors = [
            InitErrorDetails(
                type=PydanticCustomError("conflict", "{message}", conflict._asdict()), loc=conflict.path, input=None
            )
            for conflict in self.conflicts()
        ]
        if errors:
            # pydantic merges a ValidationError raised in a validator with the others: all are reported together.
            raise ValidationError.from_exception_data(type(self).__name__, errors)
        return self


def _int_from_float(value: Any) -> Any:
    # Users type `steps=1e5`, which YAML reads as a float.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and value > MAX_INT:
        raise PydanticCustomError("forms", "must be {forms}", {"forms": f"at most {MAX_INT}"})
    return value


def _tuple_from_list(value: Any) -> Any:
    # YAML has only lists; a frozen model needs tuples.
    if isinstance(value, list):
        return tuple(value)
    return value


TupleOrText = BeforeValidator(lambda value: (value,) if isinstance(value, str) else _tuple_from_list(value))
"""Accepts a single text for a tuple of texts."""


def accepted_forms(forms: str) -> WrapValidator:
    """A validator that replaces the several errors of a union of types by one that names the accepted forms."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            # one message for all members of the union, which pydantic would report one by one
            return handler(_tuple_from_list(value))
        except ValidationError as error:
            raise PydanticCustomError("forms", "must be {forms}", {"forms": forms}) from error

    check.__doc__ = forms  # also shown by the help
    return WrapValidator(check)


NonNegativeInt = Annotated[int, BeforeValidator(_int_from_float), Field(ge=0)]
PositiveInt = Annotated[int, BeforeValidator(_int_from_float), Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
PathText = Annotated[str, Field(min_length=1)]
