"""The recipe: its sections and keys, reading it from YAML and the command line, its error lines and its reference.

recipe       the complete recipe, its smaller sections, and the rules between keys
model        sections `model`, `adapter` and `tokenizer`
data         section `data`
training     sections `training`, `optimizer` and `schedule`
fields       types of the fields, with the errors that they raise
loading      YAML and overrides -> Config
messages     one error line per problem: place, expected value, the key that was meant
project      train.py, recipes and Accelerate configs by name, in a clone and in an installed package
reference    --help, docs/reference/recipe.md and the JSON schema, generated from the fields
"""

from acc_lm.config.data import MESSAGE_KEYS, DataConfig, Format, SourceConfig
from acc_lm.config.fields import EVALUATION_METRICS, Section, nearest_multiples
from acc_lm.config.model import AdapterConfig, ModelConfig, TokenizerConfig
from acc_lm.config.recipe import (
    CheckpointConfig,
    Config,
    DistributedConfig,
    Mode,
    ProfileConfig,
    flatten,
    learned_changes,
)
from acc_lm.config.training import SCHEDULES, OptimizerConfig, ScheduleConfig, TrainingConfig

__all__ = [
    "EVALUATION_METRICS",
    "MESSAGE_KEYS",
    "SCHEDULES",
    "AdapterConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DistributedConfig",
    "Format",
    "Mode",
    "ModelConfig",
    "OptimizerConfig",
    "ProfileConfig",
    "ScheduleConfig",
    "Section",
    "SourceConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "flatten",
    "learned_changes",
    "nearest_multiples",
]
