"""easypipe: raw text in, trained model out; a data pipeline and trainer for JAX in which order is
arithmetic.

Names are loaded when first used, so that `import easypipe` stays quick and does not load jax.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES: dict[str, tuple[str, ...]] = {
    "easypipe.core.errors": (
        "BudgetError",
        "CacheError",
        "ConfigError",
        "EasypipeError",
        "LedgerError",
        "MissingFileError",
        "PlacementError",
        "PlanError",
        "SourceError",
        "StageOrderError",
        "StallError",
        "StateError",
        "StorageError",
        "TokenizerError",
        "TrainError",
    ),
    "easypipe.core.ledger": ("Ledger",),
    "easypipe.core.result": ("Err", "Ok", "Result"),
    "easypipe.core.schema": ("OutputSchema", "TaskSpec"),
    "easypipe.core.protocols": (
        "BaseStage",
        "PipelineContext",
        "ProgressEvent",
        "Shard",
        "ShardedDataSource",
        "ShardedSource",
    ),
    "easypipe.faces.classify": ("ClassifyConfig",),
    "easypipe.faces.collators": (
        "create_causal_lm_collate",
        "create_collate_fn",
        "create_seq2seq_collate",
    ),
    "easypipe.faces.data_module": ("DataModuleProtocol", "UniversalDataModule"),
    "easypipe.faces.data_pipeline": ("DataPipeline", "DataPipelineConfig"),
    "easypipe.faces.datasets": (
        "PreprocessedDataset",
        "StreamingPreprocessedDataset",
        "create_preprocessed_dataset",
    ),
    "easypipe.faces.images": ("ImagesConfig",),
    "easypipe.faces.loaders": ("DataLoaderBuilder", "DataLoaderConfig", "DataLoaderFactory"),
    "easypipe.faces.masking": ("create_masked_lm_collate",),
    "easypipe.faces.micro": (
        "BPETokenizer",
        "TransformerDataset",
        "create_dataloaders",
        "train_tokenizer",
    ),
    "easypipe.faces.registry": ("CollatorRegistry",),
    "easypipe.faces.trainer": ("Trainer",),
    "easypipe.faces.vision": ("VisionDataCollator", "create_vision_collate"),
    "easypipe.loader.epochs": ("EpochLoader",),
    "easypipe.loader.explain": ("ExplainedBatch",),
    "easypipe.loader.loader": ("AsyncDataLoader", "Loader", "LoadStageConfig"),
    "easypipe.loader.state": ("LoaderState",),
    "easypipe.jobs": ("tokenize_and_save",),
    "easypipe.pipeline": ("Pipeline", "create_pipeline"),
    "easypipe.previews.samples": ("Preview", "preview"),
    "easypipe.run": ("RunConfig",),
    "easypipe.sources.cache": ("TokenCache",),
    "easypipe.sources.hub": ("HuggingFaceShardedSource",),
    "easypipe.sources.megatron": ("write_megatron",),
    "easypipe.sources.arrow": ("ArrowShardedSource",),
    "easypipe.sources.csv": ("CsvShardedSource",),
    "easypipe.sources.memory": ("InMemoryShardedSource",),
    "easypipe.sources.jsonlines": ("JsonShardedSource",),
    "easypipe.sources.parquet": ("ParquetShardedSource",),
    "easypipe.sources.txt": ("TextShardedSource",),
    "easypipe.faces.language": ("LanguageModelingDataCollator",),
    "easypipe.sources.tokens": ("TokenFilesConfig",),
    "easypipe.stages.config": ("OrderConfig", "PipelineConfig"),
    "easypipe.stages.discover": ("discover",),
    "easypipe.stages.discovery": ("Discovery",),
    "easypipe.stages.interleave": ("InterleavedSource", "block_mixture_interleave"),
    "easypipe.stages.mix": ("MixedShardedSource", "MixStageConfig"),
    "easypipe.stages.pack": ("PackStageConfig", "PackedShardedSource"),
    "easypipe.stages.plan_report": ("PlanReport",),
    "easypipe.stages.save": ("SaveReport", "SaveStageConfig"),
    "easypipe.stages.saved": ("load_saved",),
    "easypipe.stages.schedule": ("WeightSchedulePoint", "WeightScheduler"),
    "easypipe.stages.source": ("DatasetConfig",),
    "easypipe.stages.tokenize": ("TokenizeStageConfig", "TokenizedShardedSource"),
    "easypipe.stages.verify": ("Verification", "verify"),
    "easypipe.train.checkpoint_manager": ("CheckpointManager",),
    "easypipe.train.classifier_config": ("ClassifierConfig",),
    "easypipe.train.config": ("OptimizerConfig", "TrainingConfig"),
    "easypipe.train.lora_config": ("LoraConfig",),
    "easypipe.train.model": ("Decoder", "ModelConfig"),
    "easypipe.train.models.config": ("PretrainedConfig",),
    "easypipe.train.trainer": ("TrainResult",),
    "easypipe.transforms.bpe": ("train_bpe",),
    "easypipe.transforms.conversation": ("Chat",),
    "easypipe.transforms.columns": (
        "Combine",
        "Drop",
        "Extract",
        "FilterNonEmpty",
        "Rename",
        "Select",
    ),
    "easypipe.transforms.expand": ("Expand",),
    "easypipe.transforms.fill_in_the_middle": ("FillInTheMiddle",),
    "easypipe.transforms.functions": ("Filter", "Map"),
    "easypipe.transforms.lengths": ("LengthPolicy",),
    "easypipe.transforms.prompt_engine": ("PromptEngine",),
    "easypipe.transforms.prompts": ("FewShotConfig", "PromptConfig"),
    "easypipe.transforms.tokenizer": ("Tokenizer", "TokenizerConfig", "load_tokenizer"),
    "easypipe.transforms.transformed": ("TransformedSource",),
}
_HOME: dict[str, str] = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'easypipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
