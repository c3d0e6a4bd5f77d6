"""The base of the data sections of a run, and their registry by `kind`."""

from collections.abc import Container, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from manyformer.base.errors import UserError
from manyformer.config.section import ConfigSection, PathText, PositiveInt, accepted_forms

OpenFraction = Annotated[float, Field(gt=0, lt=1)]
DataPaths = Annotated[
    PathText | Annotated[tuple[PathText, ...], Field(min_length=1)], accepted_forms("a path or a list of paths")
]
PairDataPaths = Annotated[
    PathText | tuple[PathText, PathText], accepted_forms("one path, or a list of two: the source and the target file")
]
SplitSpec = Annotated[
    OpenFraction | PathText | Annotated[tuple[PathText, ...], Field(min_length=1)],
    accepted_forms("a fraction between 0 and 1, a path or a list of paths"),
]
PairSplitSpec = Annotated[
    OpenFraction | PathText | tuple[PathText, PathText],
    accepted_forms("a fraction between 0 and 1, one path, or a list of two: the source and the target file"),
]
BlockSize = Annotated[
    tuple[PositiveInt, PositiveInt], accepted_forms("a list of two: the rows and the columns of a block")
]
ColumnSpec = Annotated[
    Annotated[int, Field(ge=0)] | PathText, accepted_forms("a column's name, or its number counted from 0")
]
HeaderSpec = Annotated[
    bool | None,
    Field(
        description="Whether the first line of a TSV or CSV names its columns; null means that it is found out, and "
        "told. Columns that no setting gives are those with a usual name in a header, such as `text`, `label` or "
        "`path`, else the first ones."
    ),
]

SPECIAL_TOKENS = 5
"""Special token ids of every vocabulary: padding, beginning, end, unknown, mask."""


class ExpectedData(NamedTuple):
    """What can be said of a model before the data is read: keywords, the assumptions behind them, tokens in a row."""

    keywords: dict[str, Any]
    assumption: str
    row_length: int

    def among(self, parameters: Container[str]) -> "ExpectedData":
        """The same with the keywords that a model has."""
        return self._replace(keywords={name: value for name, value in self.keywords.items() if name in parameters})


class DataSection(ConfigSection):
    """The data of a run; a subclass is one kind of data, selected by the default of its `kind`.

    A kind may have `variants`, subclasses with settings of their own, selected by the setting `variant_setting`."""

    kind: str

    variant_setting: ClassVar[str | None] = None
    default_variant: ClassVar[str] = ""
    variants: ClassVar[dict[str, type["DataSection"]]] = {}
    swept: ClassVar[tuple[str, ...]] = ("length", "max_length")
    """Settings that a comparison may sweep: they only arrange the data; others would be different data."""

    fills_rows: ClassVar[bool] = False
    """Whether every row of training has `length` tokens, whatever the files hold."""

    @property
    def row_length(self) -> int:
        """The largest length of a row in tokens: `max_length` or `length`; 1 if only the files decide it."""
        return int(getattr(self, "max_length", getattr(self, "length", 1)))

    def expected_keywords(self, parameters: Container[str]) -> ExpectedData:
        """The model keywords among `parameters` that the data will decide, assumed where unknown without reading it."""
        keywords = {}
        if "max_length" in parameters:
            keywords["max_length"] = self.row_length
        return ExpectedData(keywords, "the data decides further sizes", self.row_length)


class GivenData(DataSection):
    """The batches that a program gives to `mf.train(model, data=...)`: no file names them, so no file can choose them.

    A run records the kind alone, and it is not among the kinds of `DATA_SECTIONS`."""

    kind: Literal["given"] = "given"
    fingerprint: str = ""
    """In a comparison, a hash of the first batch and the form of the model: others are other measurements."""


DATA_SECTIONS: dict[str, type[DataSection]] = {}
"""All kinds of data by name, in the order of registration."""

RegisteredSection = TypeVar("RegisteredSection", bound=DataSection)


def register_section(section: type[RegisteredSection]) -> type[RegisteredSection]:
    """Add a kind of data, named by the default of the field `kind`. Raises UserError if the name is taken."""
    kind = section.model_fields["kind"].default
    registered = DATA_SECTIONS.setdefault(kind, section)
    if registered is not section:
        raise UserError(
            f"data.kind={kind} is defined in {registered.__module__} and in {section.__module__}; rename one"
        )
    return section


def swept_settings() -> tuple[str, ...]:
    """The settings of all kinds of data that a comparison may sweep, each once."""
    kinds = [kind for section in DATA_SECTIONS.values() for kind in (section, *section.variants.values())]
    return tuple(dict.fromkeys(name for kind in kinds for name in kind.swept))


def select_section(settings: Mapping[str, Any]) -> type[DataSection] | None:
    """The class that the kind in the settings, and the variant of that kind, select; None if there is no such kind."""
    kind = settings.get("kind")
    if kind == "given":
        return GivenData
    section = None
    if isinstance(kind, str):
        section = DATA_SECTIONS.get(kind)
    if section is None or section.variant_setting is None:
        return section
    variant = settings.get(section.variant_setting, section.default_variant)
    if isinstance(variant, str):
        return section.variants.get(variant)
    return None


class SectionByKind:
    """Validation of a data section by the registered class of its `kind`; the JSON schema lists all of them."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema that validates with the class of `kind` at the time of the call, so that later kinds count too."""
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The union of all kinds, selected by `kind`."""
        # built at the time of the call, so that kinds of plug-ins are listed too
        members = {kind: self._core_schema(section) for kind, section in DATA_SECTIONS.items()}
        return handler(core_schema.tagged_union_schema(members, discriminator="kind"))

    @staticmethod
    def _core_schema(section: type[DataSection]) -> CoreSchema:
        if section.variant_setting is None:
            return section.__pydantic_core_schema__
        variants = {name: variant.__pydantic_core_schema__ for name, variant in section.variants.items()}
        return core_schema.tagged_union_schema(variants, discriminator=section.variant_setting)

    @staticmethod
    def _validate(settings: Any) -> DataSection:
        if isinstance(settings, DataSection):
            return settings
        if not isinstance(settings, dict):
            raise PydanticKnownError("model_attributes_type")
        section = select_section(settings)
        if section is None:
            kind = settings.get("kind")
            # hashable values only: a list is no name
            base = None
            if isinstance(kind, str):
                base = DATA_SECTIONS.get(kind)
            tag = "kind"
            names = DATA_SECTIONS
            if base is not None:
                assert base.variant_setting is not None
                tag = base.variant_setting
                names = base.variants
            expected = ", ".join(f"'{name}'" for name in names)
            # half a character, which YAML can write, has no UTF-8, and pydantic takes no other text
            tag_text = str(settings.get(tag)).encode("utf-8", "backslashreplace").decode()
            details = {"discriminator": f"'{tag}'", "tag": tag_text, "expected_tags": expected}
            raise PydanticKnownError("union_tag_invalid", details)
        return section.model_validate(settings)
