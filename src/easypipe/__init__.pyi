"""What `import easypipe` exports and from where; `__init__.py` loads each
name when it is first used.
"""

from easypipe.cache.reader import TokenCache
from easypipe.cache.verify import Verification
from easypipe.compat.classify import ClassifyConfig, ImagesConfig
from easypipe.compat.collators import (
    create_causal_lm_collate,
    create_collate_fn,
    create_seq2seq_collate,
)
from easypipe.compat.data_module import DataModuleProtocol, UniversalDataModule
from easypipe.compat.data_pipeline import DataPipeline, DataPipelineConfig
from easypipe.compat.datasets import (
    PreprocessedDataset,
    StreamingPreprocessedDataset,
    create_preprocessed_dataset,
)
from easypipe.compat.loaders import DataLoaderBuilder, DataLoaderConfig, DataLoaderFactory
from easypipe.compat.masking import create_masked_lm_collate
from easypipe.compat.registry import CollatorRegistry, LanguageModelingDataCollator
from easypipe.compat.small_transformer import (
    BPETokenizer,
    TransformerDataset,
    create_dataloaders,
    train_tokenizer,
)
from easypipe.compat.trainer import Trainer
from easypipe.compat.vision import VisionDataCollator, create_vision_collate
from easypipe.core.errors import (
    BudgetError,
    CacheError,
    ConfigError,
    EasypipeError,
    LedgerError,
    MissingExtraError,
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
from easypipe.discovery.discover import discover
from easypipe.discovery.findings import Discovery
from easypipe.jobs import tokenize_and_save
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.epochs import EpochLoader
from easypipe.loader.explain import ExplainedBatch
from easypipe.loader.loader import AsyncDataLoader, Loader
from easypipe.loader.state import LoaderState
from easypipe.pipeline import Pipeline, create_pipeline
from easypipe.plan.order import OrderConfig
from easypipe.previews.masks import ConversationMask, masks
from easypipe.previews.preview import Preview
from easypipe.previews.samples import preview
from easypipe.run import RunConfig
from easypipe.save.config import SaveStageConfig
from easypipe.save.saved import load_saved
from easypipe.save.verify import verify
from easypipe.sources.external.megatron import write_megatron
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.sources.external.token_files import TokenFilesConfig
from easypipe.sources.formats.arrow import ArrowShardedSource
from easypipe.sources.formats.csv import CsvShardedSource
from easypipe.sources.formats.jsonlines import JsonShardedSource
from easypipe.sources.formats.parquet import ParquetShardedSource
from easypipe.sources.formats.txt import TextShardedSource
from easypipe.sources.hub.source import HuggingFaceShardedSource
from easypipe.stages.config import PipelineConfig
from easypipe.stages.mix.config import MixStageConfig, WeightSchedulePoint
from easypipe.stages.mix.schedule import WeightScheduler
from easypipe.stages.mix.stage import MixedShardedSource
from easypipe.stages.pack.config import PackStageConfig
from easypipe.stages.pack.stage import PackedShardedSource
from easypipe.stages.reports.plan_report import PlanReport
from easypipe.stages.save import SaveReport
from easypipe.stages.source.config import DatasetConfig
from easypipe.stages.source.interleave import InterleavedSource, block_mixture_interleave
from easypipe.stages.tokenize.config import TokenizeStageConfig
from easypipe.stages.tokenize.documents import TokenizedShardedSource
from easypipe.stages.tokenize.engine import PromptEngine
from easypipe.train.checkpoint.manager import CheckpointManager
from easypipe.train.config import OptimizerConfig, TrainingConfig
from easypipe.train.model.config import ClassifierConfig, LoraConfig
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.model.generate import generate
from easypipe.train.model.pretrained.config import PretrainedConfig
from easypipe.train.trainer import TrainResult
from easypipe.transforms.columns.base import TransformedSource
from easypipe.transforms.columns.columns import (
    Combine,
    Drop,
    Extract,
    FilterNonEmpty,
    Rename,
    Select,
)
from easypipe.transforms.columns.conversation import Chat
from easypipe.transforms.columns.functions import Expand, Filter, Map
from easypipe.transforms.prompt.config import FewShotConfig, PromptConfig
from easypipe.transforms.prompt.fill_in_the_middle import FillInTheMiddle
from easypipe.transforms.tokenizer.bpe import train_bpe
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.lengths import LengthPolicy
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

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
    "ConversationMask",
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
    "MissingExtraError",
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
    "generate",
    "load_saved",
    "load_tokenizer",
    "masks",
    "preview",
    "tokenize_and_save",
    "train_bpe",
    "train_tokenizer",
    "verify",
    "write_megatron",
]
