"""What every option of a run does, and the test that shows it: tests/option_effects.py for the
config classes of `train/` and RunConfig.

Training has no second mode, so an entry's words for cached tokens are its words, and those for
streaming are left out. A new option gets a line here; tests/test_options.py fails without it.
"""

from __future__ import annotations

from option_effects import Effect

_ADDED = "train/test_added_tokens.py::"
_TRAINER = "train/test_trainer.py::"
_NAMED = "train/test_named_callbacks.py::"
_SAMPLED = "test_samples_are_written_and_nothing_else_is_another"
_DRAWN = "test_what_is_drawn_follows_from_the_options"
_HARNESS = "train/test_harness.py::"
_WATCH = "train/test_watch.py::"
_STEP = "train/test_step.py::"
_OPTIMIZERS = "train/test_optimizers.py::"
_EACH = _OPTIMIZERS + "test_every_option_of_an_optimizer_does_something_and_others_are_refused"
_SCHEDULES = _OPTIMIZERS + "test_f25_schedules_have_their_formula"
_MODEL = "train/test_model.py::"
_MESH = "train/test_mesh_runs.py::"
_ALONE = "train/test_processes.py::test_who_does_not_meet_the_others_says_so_in_time"
_PROCESSES = (
    "train/test_processes.py::test_the_curve_is_the_same_bit_for_bit_for_one_two_and_four_processes"
)
_LOGITS = "train/test_model_options.py::test_an_option_changes_the_logits"
_LORA = "train/test_lora.py::"
_TUNED = "train/test_finetune.py::"
_DISTILL = "train/test_distill.py::"
_PREFERENCE = "train/test_preference.py::"
_REACH = "train/test_train_options.py::"
_PROGRAM = _REACH + "test_loss_options_change_the_program_that_is_compiled"

OPTIONS: dict[str, dict[str, Effect]] = {
    "RunConfig": {
        "data": Effect(
            "output",
            "cli/test_quickstart.py::test_it_does_what_it_says",
            "what is trained on: see PipelineConfig",
        ),
        "train": Effect(
            "output", "cli/test_quickstart.py::test_it_does_what_it_says", "see TrainingConfig"
        ),
        "model": Effect(
            "output", "cli/test_quickstart.py::test_it_does_what_it_says", "see ModelConfig"
        ),
        "eval": Effect(
            "output",
            "cli/test_quickstart.py::test_the_project_is_the_same_every_time_and_held_out_modules_are_apart",
            "held-out data by name; prepared with the rest, and evaluated",
        ),
    },
    "TrainingConfig": {
        "output_dir": Effect(
            "files",
            _TRAINER + "test_a_run_leaves_metrics_plot_checkpoints_and_a_better_model",
            "where all files of the run are",
        ),
        "steps": Effect(
            "output",
            _TRAINER + "test_steps_default_to_the_length_of_the_loader",
            "how long it trains",
        ),
        "epochs": Effect(
            "output",
            "compat/test_training_config.py::test_a_run_makes_the_passes_that_its_config_says",
            "how long, in passes over the data",
        ),
        "batch_size": Effect(
            "output",
            "compat/test_training_config.py::test_batches_and_passes_of_a_training_config_are_told_to_the_data",
            "rows of a batch, where the data does not say it",
        ),
        "optimizer": Effect(
            "output", _OPTIMIZERS + "test_f25_every_optimizer_descends", "see OptimizerConfig"
        ),
        "loss": Effect(
            "output", _STEP + "test_what_is_added_to_the_loss_is_not_in_nll", "see LossConfig"
        ),
        "preference": Effect(
            "output+memory",
            _PREFERENCE + "test_training_tells_the_answers_apart_and_goes_on_from_its_reference",
            "see PreferenceConfig",
        ),
        "lora": Effect(
            "output+memory", _LORA + "test_adapters_alone_are_trained_and_kept", "see LoraConfig"
        ),
        "mesh": Effect(
            "memory",
            "train/test_mesh_runs.py::test_parameters_and_moments_are_born_in_parts",
            "which part of what each device holds",
        ),
        "distributed": Effect("cost+error", _PROCESSES, "see DistributedConfig"),
        "accumulate_steps": Effect(
            "memory+output",
            "train/test_step.py::test_micro_batches_of_uneven_targets_give_the_same_update",
            "micro-batches one after the other; the same update, up to rounding",
        ),
        "seed": Effect(
            "output",
            _REACH + "test_seed_draws_other_parameters",
            "the first parameters, and dropout",
        ),
        "log_every": Effect(
            "files",
            _TRAINER + "test_lines_every_few_steps_and_the_last",
            "which steps have a line in metrics.jsonl",
        ),
        "eval_every": Effect(
            "output",
            _TRAINER + "test_a_run_leaves_metrics_plot_checkpoints_and_a_better_model",
            "when it is evaluated",
        ),
        "measure": Effect(
            "files",
            "train/test_measures.py::test_a_run_tells_the_losses_of_its_datasets_and_of_those_held_out",
            "further metrics of each step and evaluation",
        ),
        "neftune_alpha": Effect(
            "output+error",
            "train/test_neftune.py::test_evaluations_have_none",
            "noise on the embeddings, in training alone",
        ),
        "distill": Effect(
            "output+error",
            _DISTILL + "test_a_run_trains_by_the_columns_of_its_data_and_goes_on_with_the_same",
            "see DistillConfig",
        ),
        "class_weights": Effect(
            "output+error",
            "train/test_class_weights.py::test_a_run_takes_them_and_goes_on_with_the_same",
            "what each class of a classifier counts",
        ),
        "eval_batches": Effect(
            "output+cost",
            _TRAINER + "test_what_cannot_run_is_refused_before_anything_is_made",
            "ends the evaluation of a loader",
        ),
        "checkpoint": Effect(
            "files", _TRAINER + "test_keep_and_every_are_obeyed", "see CheckpointConfig"
        ),
        "callbacks": Effect(
            "output+files", _NAMED + "test_the_command_line_names_them_too", "see CallbacksConfig"
        ),
        "on_nonfinite": Effect(
            "error+output",
            _TRAINER + "test_a_loss_that_is_not_finite_names_its_step",
            "leave the step out, or stop",
        ),
        "max_nonfinite": Effect(
            "error",
            _WATCH + "test_too_many_in_a_row_stop_the_run",
            "after so many in a row the run stops",
        ),
        "spikes": Effect(
            "output", _WATCH + "test_a_spike_rolls_back_and_skips_the_window", "see SpikeConfig"
        ),
        "resume": Effect(
            "error",
            _TRAINER + "test_resume_false_refuses_a_folder_with_a_run",
            "False refuses a folder with a run",
        ),
        "resume_changes": Effect(
            "error",
            _TRAINER + "test_what_resume_changes_names_may_change",
            "what may differ from the checkpoint",
        ),
    },
    "LoraConfig": {
        option: Effect(
            "output" if option != "rank" else "output+memory",
            _LORA + "test_options_decide_size_scale_and_place",
            of,
        )
        for option, of in {
            "rank": "size of the adapters",
            "alpha": "how much they count",
            "rank_stabilized": "divides by the root of the rank",
            "targets": "which projections have one",
        }.items()
    },
    "PretrainedConfig": {
        "pretrained": Effect(
            "output",
            _TUNED + "test_a_named_model_is_tuned_in_one_line_and_saved_for_transformers",
            "which model",
        ),
        "revision": Effect(
            "output+error",
            _TUNED + "test_a_hub_name_is_trained_at_the_commit_that_it_has_today",
            "which commit of it",
        ),
        "add_tokens": Effect(
            "output+error",
            _ADDED + "test_a_run_with_new_tokens_is_saved_and_opened_again",
            "tokens that the model did not have",
        ),
        "only_added_tokens": Effect(
            "output",
            _ADDED + "test_rows_of_new_tokens_begin_as_the_mean_of_all_others",
            "whether they alone are trained",
        ),
        **{
            option: Effect(
                "output+memory+cost",
                _TUNED + "test_options_of_a_pretrained_model_are_those_of_its_decoder",
                "see ModelConfig",
            )
            for option in ("dtype", "param_dtype", "remat", "attention", "scan_layers")
        },
    },
    "LossConfig": {
        "z_loss": Effect(
            "output",
            _STEP + "test_what_is_added_to_the_loss_is_not_in_nll",
            "added to the loss, and not to nll",
        ),
        "label_smoothing": Effect(
            "output",
            _STEP + "test_what_is_added_to_the_loss_is_not_in_nll",
            "changes the loss, and not nll",
        ),
        "implementation": Effect("cost", _PROGRAM, "who computes it"),
        "rule": Effect("memory+cost", _PROGRAM, "how much of the logits exists"),
        "chunk_size": Effect("memory", _PROGRAM, "how many tokens' logits exist"),
    },
    "DistillConfig": {
        "weight": Effect(
            "output",
            _DISTILL + "test_the_loss_is_the_divergence_by_hand",
            "how much the teacher counts, compared with the labels",
        ),
        "ids": Effect(
            "output+error",
            _DISTILL + "test_batches_without_a_teacher_are_refused",
            "which column has the teacher's tokens",
        ),
        "log_probs": Effect(
            "output+error",
            _DISTILL + "test_batches_without_a_teacher_are_refused",
            "which column has their log-probs",
        ),
    },
    "PreferenceConfig": {
        "loss": Effect(
            "output",
            _PREFERENCE + "test_each_loss_has_the_formula_of_trl_in_float64",
            "what a pair costs",
        ),
        "desirable_weight": Effect(
            "output",
            "train/test_unpaired.py::test_what_an_answer_costs_is_trls_formula_in_float64",
            "weight of the desirable answers",
        ),
        "undesirable_weight": Effect(
            "output",
            "train/test_unpaired.py::test_what_an_answer_costs_is_trls_formula_in_float64",
            "weight of the others",
        ),
        "margin": Effect(
            "output+error",
            _PREFERENCE + "test_each_loss_has_the_formula_of_trl_in_float64",
            "by how much the chosen answer has to win",
        ),
        "beta": Effect(
            "output", _PREFERENCE + "test_the_loss_is_the_formula", "how much a margin counts"
        ),
        "label_smoothing": Effect(
            "output", _PREFERENCE + "test_the_loss_is_the_formula", "what wrong preferences weigh"
        ),
        "reference": Effect(
            "output+memory",
            _PREFERENCE + "test_without_a_reference_the_first_loss_tells_pairs_apart",
            "the model before training, or none",
        ),
    },
    "CheckpointConfig": {
        "every": Effect("files", _TRAINER + "test_keep_and_every_are_obeyed", "when it saves"),
        "keep": Effect("files", _TRAINER + "test_keep_and_every_are_obeyed", "how many stay"),
    },
    "CallbacksConfig": {
        "early_stopping": Effect(
            "output", _NAMED + "test_a_run_stops_early_and_says_why", "see EarlyStoppingConfig"
        ),
        "best": Effect(
            "files", _NAMED + "test_the_best_checkpoints_are_kept_and_listed", "see BestConfig"
        ),
        "tensorboard": Effect(
            "files", _NAMED + "test_tensorboard_has_every_number_once", "see TensorBoardConfig"
        ),
        "wandb": Effect(
            "files", _NAMED + "test_wandb_offline_keeps_the_run_and_no_key", "see WandbConfig"
        ),
        "trackio": Effect(
            "output", _NAMED + "test_trackio_goes_on_in_its_run", "see TrackioConfig"
        ),
        "mlflow": Effect("files", _NAMED + "test_mlflow_goes_on_in_its_run", "see MlflowConfig"),
        "profile": Effect(
            "files", _NAMED + "test_a_profile_of_the_window_is_written", "see ProfileConfig"
        ),
        "heartbeat": Effect(
            "files",
            _NAMED + "test_heartbeats_are_renewed_and_say_how_it_ended",
            "see HeartbeatConfig",
        ),
        "samples": Effect("files", "train/test_samples.py::" + _SAMPLED, "see SamplesConfig"),
        "lm_eval": Effect(
            "files+error",
            _HARNESS + "test_a_run_is_asked_at_every_checkpoint_and_by_the_command",
            "see LmEvalConfig",
        ),
    },
    "LmEvalConfig": {
        option: Effect("output+error", _HARNESS + "test_what_is_configured_reaches_lm_eval", text)
        for option, text in (
            ("tasks", "what is asked"),
            ("include_path", "where further tasks are found"),
            ("limit", "documents of each task"),
            ("num_fewshot", "examples before each question"),
            ("chat", "asked by the chat template"),
            ("batch_size", "rows that are read at once"),
            ("max_length", "what is further left is cut"),
        )
    },
    "SamplesConfig": {
        option: Effect(effect, "train/test_samples.py::" + test, text)
        for option, effect, test, text in (
            ("prompts", "files", _SAMPLED, "what texts begin with"),
            ("every", "files", _SAMPLED, "after which steps"),
            (
                "messages",
                "files+error",
                "test_conversations_are_answered_by_the_template",
                "what is answered",
            ),
            ("max_new_tokens", "files", _DRAWN, "how long texts are"),
            ("temperature", "files", _DRAWN, "how even the odds are"),
            ("seed", "files", _DRAWN, "what is drawn"),
        )
    },
    "EarlyStoppingConfig": {
        "metric": Effect(
            "output+error",
            _NAMED + "test_metrics_that_will_not_be_there_are_refused",
            "what is watched",
        ),
        **{
            option: Effect(
                "output", _NAMED + "test_early_stopping_follows_its_options_and_its_state", of
            )
            for option, of in {
                "mode": "whether lower or higher is better",
                "patience": "values without a gain that end the run",
                "min_delta": "the least gain that counts",
            }.items()
        },
    },
    "BestConfig": {
        "metric": Effect(
            "files+error",
            _NAMED + "test_metrics_that_will_not_be_there_are_refused",
            "what decides",
        ),
        "mode": Effect(
            "files",
            _NAMED + "test_the_best_checkpoints_are_kept_and_listed",
            "whether lower or higher is better",
        ),
        "keep": Effect(
            "files", _NAMED + "test_the_best_checkpoints_are_kept_and_listed", "how many stay"
        ),
    },
    "TensorBoardConfig": {
        "folder": Effect(
            "files", _NAMED + "test_tensorboard_has_every_number_once", "where event files are"
        ),
        "flush_s": Effect(
            "files",
            _NAMED + "test_tensorboard_writes_what_it_has_after_flush_s",
            "how old what is on the disk may be",
        ),
    },
    "TrackioConfig": {
        option: Effect("output", _NAMED + "test_trackio_goes_on_in_its_run", of)
        for option, of in {
            "project": "where the run is listed",
            "name": "what it is called",
        }.items()
    },
    "MlflowConfig": {
        option: Effect("files", _NAMED + "test_mlflow_goes_on_in_its_run", of)
        for option, of in {
            "experiment": "where the run is listed",
            "name": "what it is called",
            "tracking_uri": "sent, or kept in the output folder",
        }.items()
    },
    "WandbConfig": {
        option: Effect("output", _NAMED + "test_wandb_offline_keeps_the_run_and_no_key", of)
        for option, of in {
            "project": "where the run is listed",
            "entity": "whose it is",
            "name": "what it is called",
            "mode": "sent, or kept in the output folder",
        }.items()
    },
    "ProfileConfig": {
        "start": Effect(
            "files+error",
            _NAMED + "test_a_profile_of_the_window_is_written",
            "the first step that is traced",
        ),
        "steps": Effect(
            "files", _NAMED + "test_the_window_is_as_long_as_it_is_told", "how many are"
        ),
    },
    "HeartbeatConfig": {
        "every_s": Effect(
            "files",
            _NAMED + "test_heartbeats_come_no_more_often_than_every_s",
            "how often the file is renewed",
        ),
    },
    "SpikeConfig": {
        "window": Effect(
            "output",
            _WATCH + "test_the_limit_is_robust",
            "how many good steps the limit is made from",
        ),
        "threshold": Effect(
            "output", _WATCH + "test_the_limit_is_robust", "how far above the median the limit is"
        ),
        "patience": Effect(
            "output",
            _WATCH + "test_a_spike_rolls_back_and_skips_the_window",
            "bad steps before it goes back",
        ),
        "max_rollbacks": Effect(
            "error", _WATCH + "test_a_run_that_spikes_for_ever_stops", "after so many the run stops"
        ),
    },
    "OptimizerConfig": {
        "name": Effect(
            "output", _OPTIMIZERS + "test_f25_every_optimizer_descends", "which optimizer"
        ),
        "learning_rate": Effect("output", _SCHEDULES, "the peak of the schedule"),
        "schedule": Effect("output", _SCHEDULES, "how the learning rate moves"),
        "warmup_steps": Effect("output", _SCHEDULES, "steps that it rises"),
        "cooldown_steps": Effect("output", _SCHEDULES, "last steps, in which it falls to the end"),
        "cooldown_shape": Effect("output", _SCHEDULES, "along which curve"),
        "final_fraction": Effect("output", _SCHEDULES, "where it ends, as a share of the peak"),
        "power": Effect("output", _SCHEDULES, "of the polynomial schedule"),
        **{
            option: Effect("output+error", _EACH, f"{of}; refused by optimizers without it")
            for option, of in {
                "beta1": "how long the first moment remembers",
                "beta2": "how long the second moment remembers",
                "beta3": "how long the slow moment remembers",
                "epsilon": "added where it divides",
                "momentum": "of muon",
                "newton_schulz_steps": "how orthogonal muon's updates are",
                "decay_rate": "how long adafactor's second moments remember",
                "gamma": "scale of sophia's curvature",
                "alpha": "weight of ademamix's slow moment",
                "update_interval": "steps between sophia's estimates, or turns of soap's basis",
                "max_precondition_dim": "longest side that soap turns",
            }.items()
        },
        "weight_decay": Effect(
            "output",
            _OPTIMIZERS + "test_decay_is_decoupled_on_matrices_alone_and_groups_train_otherwise",
            "shrinks matrices by the rate times this",
        ),
        "clip_norm": Effect(
            "output",
            "train/test_optim.py::test_updates_are_those_of_the_paper",
            "longer gradients are scaled to it",
        ),
        "ema_decay": Effect(
            "output",
            _OPTIMIZERS + "test_ema_decay_evaluates_a_running_average_of_what_is_trained",
            "an average of the weights is evaluated and kept",
        ),
        "groups": Effect(
            "output",
            _OPTIMIZERS + "test_decay_is_decoupled_on_matrices_alone_and_groups_train_otherwise",
            "see ParameterGroup",
        ),
    },
    "ParameterGroup": {
        "match": Effect(
            "output+error",
            _OPTIMIZERS + "test_a_group_decides_by_name_first_match_first",
            "which parameters",
        ),
        "learning_rate_scale": Effect(
            "output",
            _OPTIMIZERS + "test_a_group_decides_by_name_first_match_first",
            "times the schedule",
        ),
        "weight_decay": Effect(
            "output",
            _OPTIMIZERS + "test_a_group_decides_by_name_first_match_first",
            "in place of the optimizer's",
        ),
    },
    "ModelConfig": {
        **{
            option: Effect(
                "output+memory",
                _REACH + "test_sizes_are_those_of_the_parameters",
                f"size of the parameters: {of}",
            )
            for option, of in {
                "vocab_size": "rows of embedding and head",
                "hidden_size": "width between layers",
                "intermediate_size": "width inside the MLP",
                "num_layers": "layers",
                "num_heads": "heads of the queries",
                "num_kv_heads": "heads of keys and values",
                "head_dim": "width of a head",
            }.items()
        },
        "rope_theta": Effect(
            "output",
            _REACH + "test_numbers_of_the_model_change_its_logits",
            "how fast positions turn",
        ),
        "norm_epsilon": Effect(
            "output",
            _REACH + "test_numbers_of_the_model_change_its_logits",
            "added where norms divide",
        ),
        "tie_embeddings": Effect("output+memory", _MODEL + "test_parameters", "no head of its own"),
        "dtype": Effect("output+cost", _MODEL + "test_dtypes", "of products and activations"),
        "param_dtype": Effect("output+memory", _MODEL + "test_dtypes", "of parameters"),
        "remat": Effect(
            "memory+cost",
            _MODEL + "test_remat_keeps_less_and_unrolling_leaves_no_loop",
            "what is computed twice",
        ),
        "attention": Effect(
            "memory+cost",
            "train/test_attention.py::test_for_tpus_splash_is_compiled_and_no_scores_exist",
            "who computes attention",
        ),
        "scan_layers": Effect(
            "cost",
            _MODEL + "test_remat_keeps_less_and_unrolling_leaves_no_loop",
            "one compiled layer, or each",
        ),
        **{
            option: Effect("output", _LOGITS, of)
            for option, of in {
                "rope_scaling": "see RopeScaling",
                "local_rope_theta": "how fast positions turn in layers with a window",
                "sliding_window": "how far back a query sees",
                "global_every": "which layers have no window",
                "qk_norm": "queries and keys are normalised",
                "attention_width": "what scores are divided by",
                "attention_soft_cap": "bounds scores",
                "logit_soft_cap": "bounds logits",
                "activation": "of the MLP's gate",
                "post_norms": "what attention and MLP give is normalised",
                "scale_embeddings": "embeddings are scaled",
            }.items()
        },
        "qkv_bias": Effect(
            "output",
            "train/test_model_options.py::test_caps_bound_and_bias_and_scales_are_parameters",
            "three biases a layer",
        ),
        "norm_scale": Effect(
            "output",
            "train/test_model_options.py::test_caps_bound_and_bias_and_scales_are_parameters",
            "norms multiply by w, or by 1 + w",
        ),
    },
    "MeshConfig": {
        "preset": Effect(
            "memory",
            _MESH + "test_presets_are_meshes",
            "along which axis devices lie, and where the optimizer's state does",
        ),
        "data": Effect(
            "memory", _MESH + "test_presets_are_meshes", "replicas with rows of their own"
        ),
        "fsdp": Effect(
            "memory",
            _MESH + "test_parameters_and_moments_are_born_in_parts",
            "replicas that share one copy of the parameters",
        ),
        "sequence": Effect(
            "memory",
            _MESH + "test_rows_lie_in_parts_and_parameters_where_the_rules_say",
            "devices that share a row",
        ),
        "tensor": Effect(
            "memory",
            _MESH + "test_parameters_and_moments_are_born_in_parts",
            "devices that share every layer",
        ),
        "axis_rules": Effect(
            "memory",
            _MESH + "test_rows_lie_in_parts_and_parameters_where_the_rules_say",
            "over which axes a dimension is divided",
        ),
    },
    "DistributedConfig": {
        "enabled": Effect(
            "cost",
            "train/test_processes.py::test_where_nothing_speaks_of_other_processes_nothing_is_done",
            "False: alone in any case",
        ),
        "coordinator_address": Effect(
            "error", _ALONE, "where processes meet; by its variable in the runs of several"
        ),
        "num_processes": Effect("error", _ALONE, "how many meet"),
        "process_id": Effect("error+files", _ALONE, "which of them this is; 0 writes the files"),
        "timeout": Effect("error", _ALONE, "how long they wait for each other"),
        "heartbeat": Effect(
            "error",
            "train/test_processes.py::test_a_lost_process_ends_the_others_after_its_heartbeats",
            "when a silent process is lost",
        ),
    },
    "RopeScaling": {
        "kind": Effect("output", _LOGITS, "which positions turn slower"),
        "factor": Effect(
            "output", _REACH + "test_numbers_of_the_model_change_its_logits", "how much slower"
        ),
        "low_freq_factor": Effect("output", _LOGITS, "which pairs are slowed by all of factor"),
        "high_freq_factor": Effect("output", _LOGITS, "which pairs are left alone"),
        "original_length": Effect("output", _LOGITS, "the row length that these are measured by"),
    },
}
