"""What every section of a run has in common: frozen, strict, no unknown settings, conflicts told by path."""

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


class SettingConflict(NamedTuple):
    """Settings that are fine alone and wrong together: the one to blame, why, and the others (dotted, from the top)."""

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
    def fill(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The settings as given, with those defaults filled in that depend on other settings."""
        return given

    def conflicts(self) -> Iterable[SettingConflict]:
        """Mistakes between settings; empty when all is well."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        return cls.fill(dict(given)) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        found = list(self.conflicts())
        if found:
            # A ValidationError raised in a validator joins the others, each with its path: all are reported together.
            raise ValidationError.from_exception_data(type(self).__name__, [_detail(conflict) for conflict in found])
        return self


def _detail(conflict: SettingConflict) -> InitErrorDetails:
    error = PydanticCustomError("conflict", "{what}", {"what": conflict.message, "involves": conflict.other_settings})
    return InitErrorDetails(type=error, loc=conflict.path, input=None)


def _whole(value: Any) -> Any:
    # `steps=1e5` is what people type; YAML reads it as a float.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tuple(value: Any) -> Any:
    # YAML has lists only; a frozen record wants tuples.
    return tuple(value) if isinstance(value, list) else value


def one_of_forms(sentence: str) -> WrapValidator:
    """Turns the several complaints of a union of types into one sentence that says which forms are right."""

    def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(_tuple(value))
        except ValidationError as error:
            raise PydanticCustomError("forms", "must be {forms}", {"forms": sentence}) from error

    check.__doc__ = sentence  # the help says it too
    return WrapValidator(check)


NonNegativeInt = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
PositiveInt = Annotated[int, BeforeValidator(_whole), Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
PathText = Annotated[str, Field(min_length=1)]
