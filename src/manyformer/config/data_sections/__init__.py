"""Data sections of a run and their registry; the order of the imports is that of registration."""

from manyformer.config.data_sections.data_section import (
    DATA_SECTIONS,
    DataSection,
    SectionByKind,
    register_section,
    select_section,
    swept_settings,
)

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
    TreesData,
)
from manyformer.config.data_sections.images_section import ImagesData  # isort: skip
from manyformer.config.data_sections.synthetic_section import SyntheticData, register_rule_section  # isort: skip
from manyformer.config.data_sections.sequence_rule_sections import (  # isort: skip
    AdditionData,
    DuplicateData,
    HopsData,
    MarkedData,
    MarkovData,
    PeriodicData,
)
from manyformer.config.data_sections.recall_rule_sections import CopyData, MQARData, NeedleData  # isort: skip
from manyformer.config.data_sections.mad_rule_sections import (  # isort: skip
    InContextRecallData,
    MADCompressionData,
    MADCopyData,
    MADFuzzyRecallData,
    MADMemorizationData,
    MADNoisyRecallData,
    MADRecallData,
)
from manyformer.config.data_sections.state_rule_sections import StateTrackingData  # isort: skip
from manyformer.config.data_sections.untokenized_sections import EnvironmentData, GraphsData, TrajectoriesData  # isort: skip
from manyformer.config.data_sections.audio_sections import AudioData, ModalitiesData  # isort: skip

from manyformer.config.data_sections.structure_rule_sections import (  # isort: skip
    ListOpsData,
    PathfinderData,
    RegularLanguageData,
)

__all__ = [
    "DATA_SECTIONS",
    "AdditionData",
    "AudioData",
    "CopyData",
    "DataSection",
    "DuplicateData",
    "EncodedTextData",
    "EnvironmentData",
    "GraphsData",
    "HopsData",
    "ImagesData",
    "InContextRecallData",
    "LabelsData",
    "ListOpsData",
    "MADCompressionData",
    "MADCopyData",
    "MADFuzzyRecallData",
    "MADMemorizationData",
    "MADNoisyRecallData",
    "MADRecallData",
    "MQARData",
    "MarkedData",
    "MarkovData",
    "ModalitiesData",
    "NeedleData",
    "PairsData",
    "PathfinderData",
    "PeriodicData",
    "QuestionsData",
    "RegularLanguageData",
    "SectionByKind",
    "SentencePairsData",
    "StateTrackingData",
    "SyntheticData",
    "TabularTextData",
    "TextData",
    "TokenizedData",
    "TrajectoriesData",
    "TreesData",
    "register_rule_section",
    "register_section",
    "select_section",
    "swept_settings",
]
