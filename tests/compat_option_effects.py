"""What every option of a face's config does, and the test that shows it: tests/option_effects.py
for the config classes of `compat/`.

As for runs, an entry's words for cached tokens are its words. A new option gets a line here;
tests/test_options.py fails without it.
"""

from __future__ import annotations

from option_effects import Effect

_LOADERS = "compat/test_loaders.py::"
_YAML = "compat/test_document_000.py::"
_CHECKS = _YAML + "test_three_views_of_one_check"
_IMAGES = "compat/test_classify.py::"
_REGISTRY = "compat/test_registry.py::"

OPTIONS: dict[str, dict[str, Effect]] = {
    "DataPipelineConfig": {
        "type": Effect("error", _CHECKS, "`data_module`: which kind of file this is"),
        "version": Effect("error", _CHECKS, "`1.0`: what the keys mean; another is refused"),
        "dataset": Effect("output", _YAML + "test_law_9_it_is_a_pipeline", "see DatasetSection"),
        "tokenizer": Effect(
            "output", _YAML + "test_options_of_the_sections", "see TokenizerSection"
        ),
        "prompt_template": Effect(
            "output", _YAML + "test_only_the_label_column_is_trained", "see PromptConfig"
        ),
        "dataloader": Effect(
            "output", _YAML + "test_law_9_it_is_a_pipeline", "see DataLoaderConfig"
        ),
    },
    "DatasetSection": {
        "name": Effect(
            "output",
            _YAML + "test_a_name_that_is_no_path_is_on_the_hub",
            "files, a folder, or a dataset of the Hub",
        ),
        "columns": Effect(
            "error",
            _YAML + "test_every_problem_between_sections_is_listed",
            "what may be read; others are refused",
        ),
        "subset": Effect(
            "output",
            _YAML + "test_a_name_that_is_no_path_is_on_the_hub",
            "the configuration of a dataset of the Hub",
        ),
        "revision": Effect(
            "output",
            _YAML + "test_a_name_that_is_no_path_is_on_the_hub",
            "branch, tag or commit of a dataset of the Hub",
        ),
        "data_files": Effect(
            "output", _YAML + "test_splits_by_files_and_local_files", "the files of each split"
        ),
        "num_rows": Effect(
            "output",
            _YAML + "test_f16_f20_f21_more_options_of_the_file",
            "only the first so many rows of a split",
        ),
        "streaming": Effect(
            "memory",
            _YAML + "test_f16_f20_f21_more_options_of_the_file",
            "read forward, nothing counted or kept",
        ),
        "storage_options": Effect(
            "output",
            _YAML + "test_f16_f20_f21_more_options_of_the_file",
            "how remote files are reached",
        ),
    },
    "TokenizerSection": {
        "name_or_path": Effect(
            "output",
            _YAML + "test_what_only_data_can_tell_is_err_of_get_dataloader",
            "which tokenizer",
        ),
        "max_length": Effect(
            "output",
            _YAML + "test_options_of_the_sections",
            "tokens that are kept, and the width of batches",
        ),
        "truncation": Effect(
            "output",
            _YAML + "test_options_of_the_sections",
            "False keeps what is longer than max_length",
        ),
        "padding": Effect(
            "output",
            _YAML + "test_options_of_the_sections",
            "to max_length, or to the longest row of the batch",
        ),
        "padding_side": Effect(
            "output",
            _YAML + "test_f16_f20_f21_more_options_of_the_file",
            "where the tokens are not",
        ),
        "pad_to_multiple_of": Effect(
            "output", _YAML + "test_f16_f20_f21_more_options_of_the_file", "rounds widths up"
        ),
        "length": Effect(
            "output",
            _YAML + "test_f16_f20_f21_more_options_of_the_file",
            "what becomes of long samples",
        ),
        "use_fast": Effect(
            "cost",
            _YAML + "test_options_of_the_sections",
            "False encodes with the reference; the same tokens",
        ),
    },
    "DataLoaderConfig": {
        "batch_size": Effect(
            "output", _LOADERS + "test_law_determinism_and_every_row_once_a_pass", "rows of a batch"
        ),
        "shuffle": Effect(
            "output",
            _LOADERS + "test_law_determinism_and_every_row_once_a_pass",
            "a new order every pass",
        ),
        "num_workers": Effect(
            "threads",
            _LOADERS + "test_threads_are_as_many_as_asked_for_and_end",
            "threads that make batches ahead",
        ),
        "prefetch_factor": Effect(
            "memory",
            _LOADERS + "test_threads_are_as_many_as_asked_for_and_end",
            "batches ahead of each thread",
        ),
        "pin_memory": Effect(
            "error",
            "compat/test_torch_options.py::test_what_has_no_effect_is_said",
            "a warning: nothing is pinned",
        ),
        "persistent_workers": Effect(
            "error",
            "compat/test_torch_options.py::test_what_has_no_effect_is_said",
            "a warning: threads need not be kept",
        ),
        "prefetch_to_device": Effect(
            "output",
            _LOADERS + "test_device_arrays_fill_a_short_last_batch_with_nothing",
            "jax.Arrays",
        ),
        "drop_last": Effect(
            "output",
            _LOADERS + "test_drop_last_follows_shuffle_unless_it_is_said",
            "no last batch that is not full",
        ),
        "seed": Effect(
            "output",
            _LOADERS + "test_f33_the_same_seed_gives_the_same_order_and_another_another",
            "of every order",
        ),
        "collate_fn": Effect(
            "output",
            _LOADERS + "test_law_exact_resume_of_any_dataset",
            "what makes a batch of rows",
        ),
        "num_epochs": Effect(
            "output",
            _LOADERS + "test_law_determinism_and_every_row_once_a_pass",
            "passes over the data",
        ),
        "group_by_length": Effect(
            "output",
            _LOADERS + "test_rows_of_like_length_stand_together_as_in_the_pipeline",
            "less padding",
        ),
        "rank": Effect(
            "output",
            _LOADERS + "test_ranks_share_the_rows_and_put_together_are_one_large_batch",
            "which of the ranks this is",
        ),
        "world_size": Effect(
            "output",
            _LOADERS + "test_ranks_share_the_rows_and_put_together_are_one_large_batch",
            "ranks that share the rows",
        ),
    },
    "TaskSpec": {
        "name": Effect(
            "error", _REGISTRY + "test_a_modality_of_ones_own", "what messages call the task"
        ),
        "modality": Effect(
            "output",
            _REGISTRY + "test_f32_tasks_find_their_collators",
            "which collators are looked at",
        ),
        "task_type": Effect(
            "output", _REGISTRY + "test_f32_tasks_find_their_collators", "which of them is taken"
        ),
        "options": Effect(
            "output",
            _REGISTRY + "test_options_of_a_task_are_its_collators",
            "options of the collator",
        ),
    },
    "ClassifyConfig": {
        "task": Effect(
            "output",
            _IMAGES + "test_what_rows_may_hold",
            "which collator makes batches, and its options",
        ),
        "data": Effect(
            "output",
            _IMAGES + "test_the_command_and_python_train_the_same_and_go_on_when_killed",
            "see ImagesConfig",
        ),
        "model": Effect("output", _IMAGES + "test_options_of_the_network", "see ClassifierConfig"),
        "train": Effect(
            "output",
            _IMAGES + "test_the_command_and_python_train_the_same_and_go_on_when_killed",
            "see TrainingConfig",
        ),
    },
    "ImagesConfig": {
        "data_files": Effect("output", _IMAGES + "test_what_rows_may_hold", "which rows"),
        "val_files": Effect(
            "output", _IMAGES + "test_options_of_the_data", "rows that are evaluated on"
        ),
        "val_split": Effect(
            "output",
            _IMAGES + "test_options_of_the_data",
            "a share of data_files that is evaluated on",
        ),
        "type": Effect(
            "output",
            _IMAGES + "test_options_of_the_data",
            "the format, where file names do not tell it",
        ),
        "split": Effect(
            "output",
            _IMAGES + "test_options_of_the_data",
            "a part of the rows, as DatasetConfig has it",
        ),
        "image_column": Effect(
            "output", _IMAGES + "test_options_of_the_data", "the column of images"
        ),
        "label_column": Effect(
            "output", _IMAGES + "test_options_of_the_data", "the column of labels"
        ),
        "classes": Effect(
            "output", _IMAGES + "test_labels_may_be_names", "the numbers of labels that are names"
        ),
        "batch_size": Effect("output", _IMAGES + "test_options_of_the_data", "rows of a batch"),
        "num_epochs": Effect(
            "output", _IMAGES + "test_options_of_the_data", "passes over the rows"
        ),
        "num_workers": Effect(
            "threads", _IMAGES + "test_options_of_the_data", "threads that make batches ahead"
        ),
        "seed": Effect("output", _IMAGES + "test_options_of_the_data", "order and split"),
        "cache_dir": Effect(
            "files",
            _IMAGES + "test_rows_of_files_are_copied_once_and_mapped",
            "where rows are copied to",
        ),
    },
    "ClassifierConfig": {
        option: Effect(
            "output" if option != "image_shape" else "error",
            _IMAGES + "test_options_of_the_network",
            of,
        )
        for option, of in {
            "kind": "convolutions, or layers over all pixels",
            "hidden_sizes": "how many layers, and how wide",
            "num_classes": "logits of a row",
            "image_shape": "the size that is trained on; others are refused",
        }.items()
    },
    "OutputSchema": {
        "dtypes": Effect(
            "output",
            "compat/test_collators.py::test_dtypes_come_from_the_output_schema_and_jax_arrays_from_return_tensors",
            "dtypes of columns",
        ),
    },
}
