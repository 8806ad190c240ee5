"""What `import easypipe` exports, for type checkers and editors; __init__.py loads the same names when they are first used."""

from easypipe.core.errors import (
    BudgetError,
    CacheError,
    ConfigError,
    EasypipeError,
    LedgerError,
    MissingFileError,
    PlacementError,
    PlanError,
    SourceError,
    StageOrderError,
    StallError,
    StateError,
    StorageError,
    TokenizerError,
    TrainError,
)
from easypipe.core.ledger import Ledger
from easypipe.core.protocols import (
    BaseStage,
    PipelineContext,
    ProgressEvent,
    Shard,
    ShardedDataSource,
    ShardedSource,
)
from easypipe.core.result import Err, Ok, Result
from easypipe.core.schema import OutputSchema, TaskSpec
from easypipe.faces.classify import ClassifyConfig
from easypipe.faces.collators import (
    create_causal_lm_collate,
    create_collate_fn,
    create_seq2seq_collate,
)
from easypipe.faces.data_module import DataModuleProtocol, UniversalDataModule
from easypipe.faces.data_pipeline import DataPipeline, DataPipelineConfig
from easypipe.faces.datasets import (
    PreprocessedDataset,
    StreamingPreprocessedDataset,
    create_preprocessed_dataset,
)
from easypipe.faces.images import ImagesConfig
from easypipe.faces.language import LanguageModelingDataCollator
from easypipe.faces.loaders import DataLoaderBuilder, DataLoaderConfig, DataLoaderFactory
from easypipe.faces.masking import create_masked_lm_collate
from easypipe.faces.micro import (
    BPETokenizer,
    TransformerDataset,
    create_dataloaders,
    train_tokenizer,
)
from easypipe.faces.registry import CollatorRegistry
from easypipe.faces.trainer import Trainer
from easypipe.faces.vision import VisionDataCollator, create_vision_collate
from easypipe.jobs import tokenize_and_save
from easypipe.loader.epochs import EpochLoader
from easypipe.loader.explain import ExplainedBatch
from easypipe.loader.loader import AsyncDataLoader, Loader, LoadStageConfig
from easypipe.loader.state import LoaderState
from easypipe.pipeline import Pipeline, create_pipeline
from easypipe.previews.samples import Preview, preview
from easypipe.run import RunConfig
from easypipe.sources.arrow import ArrowShardedSource
from easypipe.sources.cache import TokenCache
from easypipe.sources.csv import CsvShardedSource
from easypipe.sources.hub import HuggingFaceShardedSource
from easypipe.sources.jsonlines import JsonShardedSource
from easypipe.sources.megatron import write_megatron
from easypipe.sources.memory import InMemoryShardedSource
from easypipe.sources.parquet import ParquetShardedSource
from easypipe.sources.tokens import TokenFilesConfig
from easypipe.sources.txt import TextShardedSource
from easypipe.stages.config import OrderConfig, PipelineConfig
from easypipe.stages.discover import discover
from easypipe.stages.discovery import Discovery
from easypipe.stages.interleave import InterleavedSource, block_mixture_interleave
from easypipe.stages.mix import MixedShardedSource, MixStageConfig
from easypipe.stages.pack import PackedShardedSource, PackStageConfig
from easypipe.stages.plan_report import PlanReport
from easypipe.stages.save import SaveReport, SaveStageConfig
from easypipe.stages.saved import load_saved
from easypipe.stages.schedule import WeightSchedulePoint, WeightScheduler
from easypipe.stages.source import DatasetConfig
from easypipe.stages.tokenize import TokenizedShardedSource, TokenizeStageConfig
from easypipe.stages.verify import Verification, verify
from easypipe.train.checkpoint_manager import CheckpointManager
from easypipe.train.classifier_config import ClassifierConfig
from easypipe.train.config import OptimizerConfig, TrainingConfig
from easypipe.train.lora_config import LoraConfig
from easypipe.train.model import Decoder, ModelConfig
from easypipe.train.models.config import PretrainedConfig
from easypipe.train.trainer import TrainResult
from easypipe.transforms.bpe import train_bpe
from easypipe.transforms.columns import Combine, Drop, Extract, FilterNonEmpty, Rename, Select
from easypipe.transforms.conversation import Chat
from easypipe.transforms.expand import Expand
from easypipe.transforms.fill_in_the_middle import FillInTheMiddle
from easypipe.transforms.functions import Filter, Map
from easypipe.transforms.lengths import LengthPolicy
from easypipe.transforms.prompt_engine import PromptEngine
from easypipe.transforms.prompts import FewShotConfig, PromptConfig
from easypipe.transforms.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from easypipe.transforms.transformed import TransformedSource

__version__: str

__all__ = [
    "ArrowShardedSource",
    "AsyncDataLoader",
    "BPETokenizer",
    "BaseStage",
    "BudgetError",
    "CacheError",
    "Chat",
    "CheckpointManager",
    "ClassifierConfig",
    "ClassifyConfig",
    "CollatorRegistry",
    "Combine",
    "ConfigError",
    "CsvShardedSource",
    "DataLoaderBuilder",
    "DataLoaderConfig",
    "DataLoaderFactory",
    "DataModuleProtocol",
    "DataPipeline",
    "DataPipelineConfig",
    "DatasetConfig",
    "Decoder",
    "Discovery",
    "Drop",
    "EasypipeError",
    "EpochLoader",
    "Err",
    "Expand",
    "ExplainedBatch",
    "Extract",
    "FewShotConfig",
    "FillInTheMiddle",
    "Filter",
    "FilterNonEmpty",
    "HuggingFaceShardedSource",
    "ImagesConfig",
    "InMemoryShardedSource",
    "InterleavedSource",
    "JsonShardedSource",
    "LanguageModelingDataCollator",
    "Ledger",
    "LedgerError",
    "LengthPolicy",
    "LoadStageConfig",
    "Loader",
    "LoaderState",
    "LoraConfig",
    "Map",
    "MissingFileError",
    "MixStageConfig",
    "MixedShardedSource",
    "ModelConfig",
    "Ok",
    "OptimizerConfig",
    "OrderConfig",
    "OutputSchema",
    "PackStageConfig",
    "PackedShardedSource",
    "ParquetShardedSource",
    "Pipeline",
    "PipelineConfig",
    "PipelineContext",
    "PlacementError",
    "PlanError",
    "PlanReport",
    "PreprocessedDataset",
    "PretrainedConfig",
    "Preview",
    "ProgressEvent",
    "PromptConfig",
    "PromptEngine",
    "Rename",
    "Result",
    "RunConfig",
    "SaveReport",
    "SaveStageConfig",
    "Select",
    "Shard",
    "ShardedDataSource",
    "ShardedSource",
    "SourceError",
    "StageOrderError",
    "StallError",
    "StateError",
    "StorageError",
    "StreamingPreprocessedDataset",
    "TaskSpec",
    "TextShardedSource",
    "TokenCache",
    "TokenFilesConfig",
    "TokenizeStageConfig",
    "TokenizedShardedSource",
    "Tokenizer",
    "TokenizerConfig",
    "TokenizerError",
    "TrainError",
    "TrainResult",
    "Trainer",
    "TrainingConfig",
    "TransformedSource",
    "TransformerDataset",
    "UniversalDataModule",
    "Verification",
    "VisionDataCollator",
    "WeightSchedulePoint",
    "WeightScheduler",
    "__version__",
    "block_mixture_interleave",
    "create_causal_lm_collate",
    "create_collate_fn",
    "create_dataloaders",
    "create_masked_lm_collate",
    "create_pipeline",
    "create_preprocessed_dataset",
    "create_seq2seq_collate",
    "create_vision_collate",
    "discover",
    "load_saved",
    "load_tokenizer",
    "preview",
    "tokenize_and_save",
    "train_bpe",
    "train_tokenizer",
    "verify",
    "write_megatron",
]
