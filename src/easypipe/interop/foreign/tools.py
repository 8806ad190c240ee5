"""`import_config`: the tables of axolotl's, TRL's, LLaMA-Factory's keys, and what is left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from easypipe.core.config import load_yaml
from easypipe.core.errors import ConfigError, require, require_known
from easypipe.interop.foreign.datasets import (
    EXCESS,
    SPLIT,
    axolotl_datasets,
    axolotl_pretraining,
    axolotl_test_datasets,
    described,
    field,
    held_out,
    history,
    listed,
    mixed,
    mixer,
    mixture,
    probabilities,
    template,
    thinking,
    trained,
    trl_dataset,
    trl_datasets,
    trl_test_split,
)
from easypipe.interop.foreign.finish import finish
from easypipe.interop.foreign.rules import (
    NO_DROPOUT,
    NO_REWARDS,
    OPTIMIZERS,
    REWARDED,
    SCHEDULES,
    ForeignConfig,
    Key,
    Rule,
    adapter,
    always,
    beta,
    clip,
    dtype,
    judged,
    leave,
    length,
    lora,
    loss,
    named,
    needless,
    new_tokens,
    of_preferences,
    off,
    packing,
    peft,
    preference,
    reference,
    remat,
    reports,
    schedule_options,
    sharded,
    simpo_margin,
    smoothing,
    stage,
    strategy,
    targets,
    to,
    to_if_on,
    trl_beta,
    warmup,
    whole,
)


def import_config(tool: str, path: str | Path) -> ForeignConfig:
    """Returns a config of `tool` ("axolotl", "trl", "llamafactory") as one of easypipe.

    Every key of the file is carried over or reported as left out.

    Raises:
        ConfigError: The tool is unknown, the file is not a mapping, or it names no model or no rows
            to train on.
    """
    require_known(tool, tuple(TOOLS), "tool", f"no importer for {tool!r}")
    read = load_yaml(path)
    given = {key: value for key, value in read.items() if value is not None and value != ""}
    made, table = ForeignConfig(), TOOLS[tool]
    made.carried = dict.fromkeys(read.keys() - given.keys(), "is empty")
    for key, value in given.items():
        if key in table:
            try:
                table[key](Key(made, key, given))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                problem = f"{value!r} is nothing that {tool} reads there: {error!r}"
                fix = "Write it as the documentation of that tool says."
                raise ConfigError(at=f"{path}, {key}", problem=problem, fix=fix) from error
        else:
            made.left[key] = "easypipe has no key of this name"
    finish(made, tool, given)
    require(
        "model" in made.config,
        str(path),
        f"names no model, so it is not a config of {tool}",
        f"Give a YAML file of {tool}: one of {', '.join(TOOLS)}.",
    )
    require(
        "datasets" in made.part("data"),
        str(path),
        "names no dataset, so nothing can be trained by it",
        "Give the config of a training.",
    )
    return made


def lines_left(made: ForeignConfig, path: Path) -> list[str]:
    """Returns what is left out, in the order of its keys' lines in the file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found: list[tuple[int, str]] = []
    for key, why in made.left.items():
        name = re.match(r"\w+", key)
        head = f"{name[0]}:" if name else key
        number = next((n for n, line in enumerate(lines, 1) if line.startswith(head)), 0)
        found.append((number, f"line {number}, {key}: {why}"))
    return [text for _, text in sorted(found)]


def written(made: ForeignConfig, tool: str, path: Path) -> str:
    """Returns the YAML of a config, with what is left out in comments above it."""
    comments = [f"# Made of {tool}'s {path.name} by `easypipe import`."]
    if made.left:
        comments.append("# Check these keys, which are not converted, or change their meaning:")
        comments += [f"#   {line}" for line in lines_left(made, path)]
    text = yaml.safe_dump(made.config, sort_keys=False, allow_unicode=True, width=100)
    return "\n".join(comments) + "\n" + text


def assistant_only(key: Key) -> None:
    if key.value:
        key.carry("is the default of conversations")
    else:
        key.carry("train_on: all of conversations")


_CHOSEN = needless("the fastest attention of the device is taken")


_QUANTIZED = "easypipe does not quantize weights: they stay in model.dtype"


def strategy_of_excess(key: Key) -> None:
    """Converts what axolotl does with rows that are too long; `datasets` also reads the key."""
    if key.value in EXCESS:
        key.carry("in length of the datasets of conversations")
    else:
        key.unknown(f": {', '.join(EXCESS)} are")


def strategy_of_packing(key: Key) -> None:
    """Converts TRL's packing strategies; two of them keep all of a text longer than a row."""
    if key.value not in ("bfd", "bfd_split", "wrapped"):
        key.unknown(": bfd, bfd_split and wrapped are")
    elif not key.given.get("packing"):
        key.carry("has no effect there: rows are not packed")
    else:
        if key.value == "wrapped":
            key.put("data.pack.strategy", "concat")
        else:
            key.carry("data.pack.strategy: first_fit")
        if key.value != "bfd":
            key.made.dataset["length"] = dict(SPLIT)


_COMPILED = needless("XLA compiles the whole step, and fuses it")


_MESH = leave("train.mesh says how arrays are divided among devices: {data: 2, tensor: 4}")


_IMAGES = leave("text alone is trained: no images, sound or video")


_PUSH = off("a model is pushed after `easypipe export`, by the Hub's own command")


_COMMON: dict[str, Rule] = {
    "output_dir": to("train.output_dir"),
    "learning_rate": to("train.optimizer.learning_rate"),
    "weight_decay": to("train.optimizer.weight_decay"),
    "adam_beta1": to("train.optimizer.beta1"),
    "adam_beta2": to("train.optimizer.beta2"),
    "adam_epsilon": to("train.optimizer.epsilon"),
    "max_grad_norm": clip,
    "lr_scheduler_kwargs": schedule_options,
    "warmup_steps": whole("train.optimizer.warmup_steps", "is off"),
    "warmup_ratio": warmup,
    "max_steps": whole("train.steps", "says that there is no limit"),
    "logging_steps": whole("train.log_every"),
    "eval_steps": whole("train.eval_every"),
    "save_steps": whole("train.checkpoint.every"),
    "save_total_limit": whole("train.checkpoint.keep"),
    "seed": to("data.seed", "train.seed"),
    "gradient_accumulation_steps": needless("data.load.accumulation_steps, and in batch_size"),
    "gradient_checkpointing": remat,
    "gradient_checkpointing_kwargs": needless("has no counterpart in a compiled step"),
    "bf16": dtype,
    "fp16": off("products are of bfloat16 or float32"),
    "tf32": off("XLA chooses by jax_default_matmul_precision"),
    "attn_implementation": _CHOSEN,
    "trust_remote_code": off("no code of strangers is run: models are read by family"),
    "load_in_8bit": off(_QUANTIZED),
    "load_in_4bit": off(_QUANTIZED),
    "resume_from_checkpoint": always("a run goes on from its newest checkpoint"),
    "deepspeed": sharded,
    "fsdp": sharded,
    "fsdp_config": needless("has no counterpart: train.mesh says how arrays are divided"),
    "ddp_timeout": needless("has no counterpart: processes find each other by train.distributed"),
    "lora_alpha": lora("alpha"),
    "lora_dropout": off(NO_DROPOUT),
    "use_rslora": lora("rank_stabilized"),
    "neftune_noise_alpha": to_if_on("train.neftune_alpha"),
    "report_to": reports,
    "hub_model_id": _PUSH,
    "hub_strategy": _PUSH,
    "push_to_hub": _PUSH,
    "hub_model_revision": _PUSH,
    "hub_private_repo": _PUSH,
    "torch_compile": _COMPILED,
    "remove_unused_columns": needless("columns that nothing reads are not read"),
    "ddp_find_unused_parameters": needless("has no counterpart: gradients are of one program"),
    "average_tokens_across_devices": needless("the loss is a mean over all devices' targets"),
    "save_strategy": strategy("train.checkpoint.every"),
    "eval_strategy": strategy("train.eval_every"),
    "evaluation_strategy": strategy("train.eval_every"),
    "save_only_model": off("checkpoints hold all that a run needs to go on"),
    "group_by_length": off("data.load.group_by_length is for rows that are not packed"),
}


_TRANSFORMERS: dict[str, Rule] = {
    **_COMMON,
    "model_name_or_path": to("model.pretrained"),
    "model_revision": to("model.revision"),
    "torch_dtype": dtype,
    "dtype": dtype,
    "num_train_epochs": whole("data.load.num_epochs"),
    "per_device_train_batch_size": needless("in data.load.batch_size"),
    "per_device_eval_batch_size": needless("held-out data takes batches of the same size"),
    "optim": named("train.optimizer.name", OPTIMIZERS),
    "lr_scheduler_type": named("train.optimizer.schedule", SCHEDULES),
    "packing": packing,
    "logging_strategy": strategy("train.log_every"),
    "run_name": leave("see the name of train.callbacks.wandb; a run is called after its folder"),
    "do_train": always("is what `easypipe train` does"),
    "do_eval": needless("is done where there is held-out data"),
    "overwrite_output_dir": leave("a run goes on in its folder: give another one to begin anew"),
    "preprocessing_num_workers": to("data.tokenize.num_workers"),
    "log_level": needless("has no effect on what is trained"),
    "dataloader_num_workers": needless(
        "has no counterpart: data.load.prefetch_workers are threads"
    ),
}


_AXOLOTL: dict[str, Rule] = {
    **_COMMON,
    "base_model": to("model.pretrained"),
    "revision_of_model": to("model.revision"),
    "model_type": needless("is read from the model's config"),
    "tokenizer_type": needless("is read from the model's files"),
    "tokenizer_config": to("data.default_tokenizer"),
    "strict": needless("unknown keys are always refused"),
    "datasets": axolotl_datasets,
    "test_datasets": axolotl_test_datasets,
    "streaming": to_if_on("data.streaming"),
    "dataset_prepared_path": to("data.cache_dir"),
    "val_set_size": held_out,
    "sequence_len": length,
    "excess_length_strategy": strategy_of_excess,
    "sample_packing": packing,
    "eval_sample_packing": needless("held-out data is packed as `data` is"),
    "pad_to_sequence_len": needless("packed rows are full"),
    "adapter": adapter,
    "lora_r": lora("rank"),
    "lora_target_modules": targets,
    "lora_target_linear": targets,
    "lora_modules_to_save": leave("only adapters are trained, not the embeddings or the head"),
    "wandb_project": to("train.callbacks.wandb.project"),
    "wandb_entity": to("train.callbacks.wandb.entity"),
    "wandb_name": to("train.callbacks.wandb.name"),
    "micro_batch_size": needless("in data.load.batch_size"),
    "num_epochs": whole("data.load.num_epochs"),
    "optimizer": named("train.optimizer.name", OPTIMIZERS),
    "lr_scheduler": named("train.optimizer.schedule", SCHEDULES),
    "cosine_min_lr_ratio": to("train.optimizer.final_fraction"),
    "bfloat16": dtype,
    "attention": _CHOSEN,
    "flash_attention": _CHOSEN,
    "xformers_attention": _CHOSEN,
    "sdp_attention": _CHOSEN,
    "early_stopping_patience": leave("see train.callbacks.early_stopping"),
    "train_on_inputs": trained,
    "chat_template": template,
    "evals_per_epoch": leave("train.eval_every counts steps: `easypipe plan` prints how many"),
    "saves_per_epoch": leave("train.checkpoint.every counts steps"),
    "eval_max_new_tokens": needless("nothing is written during an evaluation"),
    "special_tokens": leave("the tokenizer's own are used; see data.pack.pad_token_id"),
    "plugins": leave("no plugins: the loss is fused with the head always"),
    "rl": preference,
    "rl_beta": of_preferences(beta),
    "dpo_beta": of_preferences(beta, "dpo"),
    "orpo_alpha": of_preferences(beta, "orpo"),
    "simpo_gamma": of_preferences(to("train.preference.margin"), "simpo"),
    "kto_desirable_weight": of_preferences(to("train.preference.desirable_weight"), "kto"),
    "kto_undesirable_weight": of_preferences(to("train.preference.undesirable_weight"), "kto"),
    "reward_model": off("set train.preference.loss to reward, and the columns of the pairs"),
    "pretraining_dataset": axolotl_pretraining,
    "tokens": new_tokens,
    "eot_tokens": leave("what the chat template writes behind an answer ends it"),
    "processor_type": _IMAGES,
    "skip_prepare_dataset": _IMAGES,
    "freeze_mm_modules": _IMAGES,
    "eval_batch_size": needless("held-out data takes batches of the same size"),
    "batch_size": leave("data.load.batch_size is made of micro_batch_size and the accumulation"),
    "fsdp_version": needless("has no counterpart: train.mesh says how arrays are divided"),
    "use_tensorboard": leave("see train.callbacks.tensorboard"),
    "tokenizer_use_fast": needless("is read from tokenizer.json"),
    "tokenizer_legacy": needless("is read from tokenizer.json"),
    "tokenizer_use_mistral_common": off("tokenizers are read from tokenizer.json"),
    "hf_use_auth_token": needless("a token of the Hub is found where it was logged in"),
    "auto_resume_from_checkpoints": needless("a run goes on from its newest checkpoint"),
    "low_cpu_mem_usage": needless("weights are read shard by shard"),
    "save_safetensors": needless("`easypipe export` writes safetensors"),
    "torch_dtype": dtype,
    "float16": off("products are of bfloat16 or float32"),
    "peft_use_rslora": lora("rank_stabilized"),
    "unfrozen_parameters": leave("all weights are trained, or adapters"),
    "activation_offloading": off("see model.remat"),
    "sample_packing_sequentially": leave("documents are drawn in a permuted order"),
    "lora_fan_in_fan_out": off("no such layers are known here"),
    "resize_token_embeddings_to_32x": off("the vocabulary grows by model.add_tokens alone"),
    "cut_cross_entropy": needless("the loss is fused with the head always"),
    **dict.fromkeys(
        ("dp_shard_size", "dp_replicate_size", "tensor_parallel_size", "context_parallel_size"),
        _MESH,
    ),
    **dict.fromkeys(
        (
            "lora_mlp_kernel",
            "lora_qkv_kernel",
            "lora_o_kernel",
            "use_kernels",
            "torch_compile_mode",
        ),
        _COMPILED,
    ),
    "loss_watchdog_threshold": leave("see train.spikes, which goes back to a checkpoint"),
    "loss_watchdog_patience": leave("see train.spikes"),
    "shuffle_merged_datasets": always("documents are drawn in a permuted order"),
    **{
        f"liger_{name}": needless("XLA fuses it")
        for name in (
            "rope",
            "rms_norm",
            "rms_norm_gated",
            "layer_norm",
            "glu_activation",
            "fused_linear_cross_entropy",
        )
    },
}


_TRL: dict[str, Rule] = {
    **_TRANSFORMERS,
    "dataset_name": trl_dataset,
    "datasets": trl_datasets,
    "dataset_config": needless("in data.datasets"),
    "dataset_train_split": needless("in data.datasets"),
    "dataset_test_split": trl_test_split,
    "dataset_streaming": to_if_on("data.streaming"),
    "dataset_mixture": mixture,
    "dataset_mixer": mixer,
    "dataset_splits": needless("in data.datasets; those of tests under eval, where there are any"),
    "dataset_configs": needless("in data.datasets"),
    "dataset_text_field": field("content_field"),
    "dataset_num_proc": to("data.tokenize.num_workers"),
    "dataset_kwargs": needless("what the template writes is taken as it stands"),
    "max_length": length,
    "max_seq_length": length,
    "max_prompt_length": leave("prompts are cut by the length policy of the dataset"),
    "use_peft": adapter,
    "lora_r": lora("rank"),
    "lora_target_modules": targets,
    "lora_task_type": needless("is what the run says"),
    "chat_template": template,
    "assistant_only_loss": assistant_only,
    "completion_only_loss": always("prompts are not targets"),
    "beta": trl_beta,
    **dict.fromkeys(REWARDED, leave(NO_REWARDS)),
    "loss_type": loss,
    "label_smoothing": smoothing,
    "precompute_ref_log_probs": reference,
    "simpo_gamma": simpo_margin,
    "desirable_weight": judged("train.preference.desirable_weight"),
    "undesirable_weight": judged("train.preference.undesirable_weight"),
    "max_completion_length": leave("answers are cut by the length policy of the dataset"),
    "truncation_mode": leave("see the length policy of the dataset: keep_start, keep_end"),
    "packing_strategy": strategy_of_packing,
    "padding_free": needless("rows are packed, or padded, by data.pack and the collator"),
    "eos_token": leave("the tokenizer's own is taken; see data.pack.eos_token_id"),
    "use_liger_kernel": needless("the loss is fused with the head always"),
}


_LLAMAFACTORY: dict[str, Rule] = {
    **_TRANSFORMERS,
    "stage": stage,
    "model": to("model.pretrained"),
    "model_class": needless("is read from the model's config"),
    "train_dataset": described,
    "micro_batch_size": needless("in data.load.batch_size"),
    "peft_config": peft,
    "dist_config": leave("train.mesh says how arrays are divided: fsdp"),
    "kernel_config": _COMPILED,
    "sample_backend": needless("nothing is written during a training"),
    "max_new_tokens": needless("nothing is written during a training"),
    "pure_bf16": dtype,
    "enable_liger_kernel": needless("XLA fuses it"),
    "disable_gradient_checkpointing": off("set model.remat to none"),
    "image_max_pixels": _IMAGES,
    "video_max_pixels": _IMAGES,
    "finetuning_type": adapter,
    "lora_rank": lora("rank"),
    "lora_target": targets,
    "dataset": listed,
    "dataset_dir": needless("in data.datasets"),
    "template": template,
    "cutoff_len": length,
    "max_samples": field("num_rows"),
    "overwrite_cache": needless("a cache is known by its content, and made anew when that changes"),
    "val_size": held_out,
    "plot_loss": needless("curves are drawn always"),
    "pref_beta": of_preferences(beta),
    "pref_loss": of_preferences(loss, "dpo"),
    "simpo_gamma": of_preferences(simpo_margin, "dpo"),
    "dpo_label_smoothing": of_preferences(to_if_on("train.preference.label_smoothing"), "dpo"),
    "kto_chosen_weight": of_preferences(to("train.preference.desirable_weight"), "kto"),
    "kto_rejected_weight": of_preferences(to("train.preference.undesirable_weight"), "kto"),
    "neat_packing": needless("documents of a row never see each other"),
    "mask_history": history,
    "new_special_tokens": new_tokens,
    "resize_vocab": needless("the vocabulary grows by model.add_tokens"),
    "eval_dataset": listed,
    "mix_strategy": mixed,
    "interleave_probs": probabilities,
    "enable_thinking": thinking,
    "streaming": to_if_on("data.streaming"),
    "flash_attn": _CHOSEN,
    "train_on_prompt": trained,
    "quantization_bit": leave(_QUANTIZED),
    "neftune_alpha": to_if_on("train.neftune_alpha"),
}


TOOLS: Mapping[str, Mapping[str, Rule]] = {
    "axolotl": _AXOLOTL,
    "trl": _TRL,
    "llamafactory": _LLAMAFACTORY,
}
