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
    "easypipe.compat.classify": ("ClassifyConfig",),
    "easypipe.compat.collators": (
        "create_causal_lm_collate",
        "create_collate_fn",
        "create_seq2seq_collate",
    ),
    "easypipe.compat.data_module": ("DataModuleProtocol", "UniversalDataModule"),
    "easypipe.compat.data_pipeline": ("DataPipeline", "DataPipelineConfig"),
    "easypipe.compat.datasets": (
        "PreprocessedDataset",
        "StreamingPreprocessedDataset",
        "create_preprocessed_dataset",
    ),
    "easypipe.compat.images": ("ImagesConfig",),
    "easypipe.compat.loaders": ("DataLoaderBuilder", "DataLoaderConfig", "DataLoaderFactory"),
    "easypipe.compat.masking": ("create_masked_lm_collate",),
    "easypipe.compat.small_transformer": (
        "BPETokenizer",
        "TransformerDataset",
        "create_dataloaders",
        "train_tokenizer",
    ),
    "easypipe.compat.registry": ("CollatorRegistry",),
    "easypipe.compat.trainer": ("Trainer",),
    "easypipe.compat.vision": ("VisionDataCollator", "create_vision_collate"),
    "easypipe.loader.epochs": ("EpochLoader",),
    "easypipe.loader.explain": ("ExplainedBatch",),
    "easypipe.loader.loader": ("AsyncDataLoader", "Loader", "LoadStageConfig"),
    "easypipe.loader.state": ("LoaderState",),
    "easypipe.jobs": ("tokenize_and_save",),
    "easypipe.pipeline": ("Pipeline", "create_pipeline"),
    "easypipe.previews.samples": ("Preview", "preview"),
    "easypipe.run": ("RunConfig",),
    "easypipe.cache.reader": ("TokenCache",),
    "easypipe.sources.hub.source": ("HuggingFaceShardedSource",),
    "easypipe.sources.external.megatron": ("write_megatron",),
    "easypipe.sources.formats.arrow": ("ArrowShardedSource",),
    "easypipe.sources.formats.csv": ("CsvShardedSource",),
    "easypipe.sources.external.memory": ("InMemoryShardedSource",),
    "easypipe.sources.formats.jsonlines": ("JsonShardedSource",),
    "easypipe.sources.formats.parquet": ("ParquetShardedSource",),
    "easypipe.sources.formats.txt": ("TextShardedSource",),
    "easypipe.compat.language": ("LanguageModelingDataCollator",),
    "easypipe.sources.external.token_files": ("TokenFilesConfig",),
    "easypipe.stages.config": ("OrderConfig", "PipelineConfig"),
    "easypipe.discovery.discover": ("discover",),
    "easypipe.discovery.findings": ("Discovery",),
    "easypipe.stages.source.interleave": ("InterleavedSource", "block_mixture_interleave"),
    "easypipe.stages.mix.stage": ("MixedShardedSource", "MixStageConfig"),
    "easypipe.stages.pack.stage": ("PackStageConfig", "PackedShardedSource"),
    "easypipe.stages.reports.plan_report": ("PlanReport",),
    "easypipe.save.stage": ("SaveReport", "SaveStageConfig"),
    "easypipe.save.saved": ("load_saved",),
    "easypipe.stages.mix.schedule": ("WeightSchedulePoint", "WeightScheduler"),
    "easypipe.stages.source.stage": ("DatasetConfig",),
    "easypipe.stages.tokenize.stage": ("TokenizeStageConfig", "TokenizedShardedSource"),
    "easypipe.stages.verify": ("Verification", "verify"),
    "easypipe.train.checkpoint.manager": ("CheckpointManager",),
    "easypipe.train.model.classifier_config": ("ClassifierConfig",),
    "easypipe.train.config": ("OptimizerConfig", "TrainingConfig"),
    "easypipe.train.model.lora_config": ("LoraConfig",),
    "easypipe.train.model.decoder": ("Decoder", "ModelConfig"),
    "easypipe.train.model.pretrained.config": ("PretrainedConfig",),
    "easypipe.train.trainer": ("TrainResult",),
    "easypipe.transforms.tokenizer.bpe": ("train_bpe",),
    "easypipe.transforms.columns.conversation": ("Chat",),
    "easypipe.transforms.columns.columns": (
        "Combine",
        "Drop",
        "Extract",
        "FilterNonEmpty",
        "Rename",
        "Select",
    ),
    "easypipe.transforms.columns.expand": ("Expand",),
    "easypipe.transforms.prompt.fill_in_the_middle": ("FillInTheMiddle",),
    "easypipe.transforms.columns.functions": ("Filter", "Map"),
    "easypipe.transforms.tokenizer.lengths": ("LengthPolicy",),
    "easypipe.transforms.prompt.engine": ("PromptEngine",),
    "easypipe.transforms.prompt.config": ("FewShotConfig", "PromptConfig"),
    "easypipe.transforms.tokenizer.tokenizer": ("Tokenizer", "TokenizerConfig", "load_tokenizer"),
    "easypipe.transforms.columns.transformed": ("TransformedSource",),
}
_HOME: dict[str, str] = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'easypipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
