"""Data sections of a run and their registry; the order of the imports is that of registration."""

from manyformer.config.data_sections.data_section import DATA_SECTIONS, DataSection, SectionByKind, register_section

from manyformer.config.data_sections.tokenized_sections import (  # isort: skip
    EncodedTextData,
    PairsData,
    TextData,
    TokenizedData,
)
from manyformer.config.data_sections.tabular_sections import (  # isort: skip
    LabelsData,
    QuestionsData,
    SentencePairsData,
    TabularTextData,
)
from manyformer.config.data_sections.trees_section import TreesData  # isort: skip
from manyformer.config.data_sections.images_section import ImagesData  # isort: skip
from manyformer.config.data_sections.synthetic_section import SyntheticData  # isort: skip
from manyformer.config.data_sections.trajectories_section import TrajectoriesData  # isort: skip
from manyformer.config.data_sections.environment_section import EnvironmentData  # isort: skip
from manyformer.config.data_sections.graphs_section import GraphsData  # isort: skip
from manyformer.config.data_sections.audio_section import AudioData  # isort: skip
from manyformer.config.data_sections.modalities_section import ModalitiesData  # isort: skip

__all__ = [
    "DATA_SECTIONS",
    "AudioData",
    "DataSection",
    "EncodedTextData",
    "EnvironmentData",
    "GraphsData",
    "ImagesData",
    "LabelsData",
    "ModalitiesData",
    "PairsData",
    "QuestionsData",
    "SectionByKind",
    "SentencePairsData",
    "SyntheticData",
    "TabularTextData",
    "TextData",
    "TokenizedData",
    "TrajectoriesData",
    "TreesData",
    "register_section",
]
