# pyright: strict
"""For suggestions: which key of easypipe corresponds to a key of another tool's config."""

from __future__ import annotations

from collections.abc import Mapping

_OF: Mapping[str, str] = {
    "data.cache_dir": "dataset_prepared_path",
    "data.datasets.content_field": "text_column dataset_text_field field_messages messages_column",
    "data.datasets.num_rows": "max_samples max_train_samples",
    "data.datasets.train_on": "train_on_inputs train_on_prompt assistant_only_loss",
    "data.tokenize.num_workers": "dataset_num_proc preprocessing_num_workers num_proc",
    "data.pack.seq_length": "sequence_len max_seq_length max_seq_len cutoff_len block_size "
    "context_length model_max_length",
    "data.pack.strategy": "sample_packing packing",
    "data.load.batch_size": "per_device_train_batch_size micro_batch_size train_batch_size "
    "global_batch_size",
    "data.load.num_epochs": "num_train_epochs",
    "eval": "val_set_size val_size test_split_size",
    "model.pretrained": "model_name_or_path base_model",
    "model.revision": "model_revision revision_of_model",
    "model.remat": "gradient_checkpointing",
    "model.dtype": "bf16 fp16 torch_dtype",
    "train.steps": "max_steps",
    "data.load.accumulation_steps": "gradient_accumulation_steps grad_accum",
    "train.log_every": "logging_steps",
    "train.eval_every": "eval_steps",
    "train.checkpoint.every": "save_steps",
    "train.checkpoint.keep": "save_total_limit",
    "train.mesh": "deepspeed fsdp fsdp_config",
    "train.lora": "adapter use_peft finetuning_type",
    "train.lora.rank": "lora_r lora_rank",
    "train.lora.alpha": "lora_alpha",
    "train.lora.targets": "lora_target lora_target_modules lora_target_linear",
    "train.preference.beta": "pref_beta dpo_beta rl_beta",
    "train.optimizer.name": "optim",
    "train.optimizer.schedule": "lr_scheduler lr_scheduler_type",
    "train.optimizer.warmup_steps": "warmup_ratio num_warmup_steps",
    "train.optimizer.clip_norm": "max_grad_norm gradient_clipping",
    "train.optimizer.beta1": "adam_beta1",
    "train.optimizer.beta2": "adam_beta2",
    "train.optimizer.epsilon": "adam_epsilon",
    "train.optimizer.final_fraction": "cosine_min_lr_ratio min_lr_ratio",
}
VALUES: Mapping[str, str] = {"dpo": "sigmoid"}
OURS: Mapping[str, str] = {name: path for path, names in _OF.items() for name in names.split()}


def ours(key: str) -> str | None:
    """Returns a sentence that says what another tool's key is called here; None for other keys."""
    path = OURS.get(key)
    return None if path is None else f"What other tools call {key!r} is {path} here."
