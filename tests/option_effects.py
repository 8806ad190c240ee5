"""What every option of a pipeline does, and the test that shows it. tests/test_options.py holds the
config classes against this table; docs/reference.py makes the page "What every option does" of it.
A new option gets a line here.

effect     what can be observed: output | files | threads | memory | cost | error (several joined by "+")
test       file::function below tests/; the function must be there, and its file must name the option
cached     what the option means where tokens are cached, the normal mode
streaming  what it means with streaming=True: SAME; "refused: why"; or other words
"""

from __future__ import annotations

import typing
from typing import Any, NamedTuple

from easypipe.core.config import is_config

SAME = "the same"


def config_classes(*roots: type) -> dict[str, type]:
    """`roots` and every config class that their fields, and theirs, are made of."""
    found: dict[str, type] = {}

    def look(hint: Any) -> None:
        if is_config(hint) and hint.__name__ not in found:
            found[hint.__name__] = hint
            for inner in typing.get_type_hints(hint).values():
                look(inner)
        for argument in typing.get_args(hint):
            look(argument)

    for root in roots:
        look(root)
    return found


class Effect(NamedTuple):
    effect: str
    test: str
    cached: str
    streaming: str = SAME


NO_SAVE = "refused: streaming writes nothing"
NO_TOKENS = "refused: streaming keeps no tokens"
ONCE = "streaming tokenizes each time it reads"

OPTIONS: dict[str, dict[str, Effect]] = {
    "PipelineConfig": {
        "datasets": Effect(
            "output",
            "test_pipeline.py::test_configs_that_are_refused",
            "the datasets, each with its own options",
        ),
        "default_tokenizer": Effect(
            "output",
            "test_pipeline.py::test_tokenizers_go_by_dataset_then_stage_then_pipeline",
            "the tokenizer of datasets without one",
        ),
        "seed": Effect(
            "output",
            "test_pipeline.py::test_an_unseeded_pipeline_draws_a_seed_and_says_which",
            "every order in the pipeline",
        ),
        "cache_dir": Effect(
            "files",
            "test_options.py::test_cache_dir_is_where_everything_is_kept",
            "where tokens, indexes and plans are kept",
            "where indexes of counted formats and verdicts on fast tokenizers are kept; no tokens",
        ),
        "cache": Effect(
            "cost+error",
            "stages/test_remote_cache.py::test_options",
            "how a cache_dir or cache_path at a URL is read: see CacheConfig; refused where there "
            "is none",
            NO_TOKENS,
        ),
        "streaming": Effect(
            "output+cost",
            "loader/test_streaming.py::test_nothing_is_written_to_the_token_cache",
            "off",
            "on",
        ),
        "num_streams": Effect(
            "output",
            "loader/test_streaming.py::test_any_shards_and_streams",
            "refused: there are no streams",
            "the streams that the rows of a batch belong to",
        ),
        "executor": Effect(
            "cost",
            "executors/test_ray.py::test_f15_a_cluster_makes_the_bytes_that_this_process_makes",
            "who tokenizes: this process, or a Ray cluster; the same bytes",
            "refused: it fills a token cache",
        ),
        "order": Effect(
            "output",
            "test_pipeline.py::test_order_without_shuffle_is_the_order_of_the_files",
            "see OrderConfig",
        ),
        "tokenize": Effect(
            "output",
            "test_options.py::test_stages_take_the_config_of_the_pipeline",
            "see TokenizeStageConfig",
        ),
        "mix": Effect(
            "output",
            "test_options.py::test_stages_take_the_config_of_the_pipeline",
            "see MixStageConfig",
        ),
        "pack": Effect(
            "output",
            "test_options.py::test_stages_take_the_config_of_the_pipeline",
            "see PackStageConfig",
        ),
        "save": Effect(
            "files",
            "test_options.py::test_stages_take_the_config_of_the_pipeline",
            "see SaveStageConfig",
            NO_SAVE,
        ),
        "load": Effect(
            "output",
            "test_options.py::test_stages_take_the_config_of_the_pipeline",
            "see LoadStageConfig",
        ),
    },
    "CacheConfig": {
        "reading": Effect(
            "cost",
            "stages/test_remote_cache.py::test_reading_ranges_fetches_less_than_shards",
            "whole token files are fetched, each checked, or only what a batch has",
            NO_TOKENS,
        ),
        "staging_bytes": Effect(
            "files+cost",
            "stages/test_remote_cache.py::test_staged_bytes_are_given_back_to_the_disk",
            "how much of the fetched tokens stays on this machine's disk",
            NO_TOKENS,
        ),
        "staging_dir": Effect(
            "files+error",
            "stages/test_remote_cache.py::test_staging_dir_is_where_fetched_tokens_are",
            "on which disk",
            NO_TOKENS,
        ),
        "storage_options": Effect(
            "output",
            "stages/test_remote_cache.py::test_batches_are_those_of_a_local_cache",
            "passed to fsspec",
            NO_TOKENS,
        ),
    },
    "OrderConfig": {
        "shuffle": Effect(
            "output",
            "test_pipeline.py::test_order_without_shuffle_is_the_order_of_the_files",
            "a permutation of all documents, a new one every epoch",
            "the pieces of files come in a permuted order, and documents are permuted within a "
            "window",
        ),
        "block_rows": Effect(
            "output+cost",
            "plan/test_order.py::test_blocks_stay_together_and_every_pass_is_complete",
            "neighbouring documents stay together, so that reads are large",
            "refused: ranges are read whole",
        ),
    },
    "DatasetConfig": {
        "data_files": Effect(
            "output", "sources/test_files.py::test_paths_globs_folders_lists", "what is read"
        ),
        "name": Effect(
            "output",
            "test_pipeline.py::test_configs_that_are_refused",
            "how weights, reports and errors call it",
        ),
        "type": Effect(
            "output",
            "sources/test_files.py::test_format_of",
            "the format, where names do not tell it",
        ),
        "split": Effect(
            "output",
            "sources/test_splits.py::test_a_part_is_what_datasets_makes_of_it",
            "which split of a dataset of the Hub, or of a DatasetDict, or which part of one",
            "the same; a part of line files is found by counting their rows, as where tokens are "
            "cached",
        ),
        "subset": Effect(
            "output",
            "sources/test_hub.py::test_layouts",
            "which configuration of a dataset of the Hub",
        ),
        "revision": Effect(
            "output",
            "sources/test_hub.py::test_the_commit_is_kept",
            "which commit of a dataset of the Hub",
        ),
        "text_unit": Effect(
            "output+error",
            "sources/test_text_units.py::test_what_each_unit_gives",
            "what a document of text files is",
        ),
        "token_files": Effect(
            "output+error",
            "sources/test_tokens.py::test_layouts_are_for_token_files",
            "how documents lie in files of tokens",
        ),
        "hold_out": Effect(
            "output",
            "stages/test_hold_out.py::test_the_two_sides_are_disjoint_and_stable",
            "which side is read",
        ),
        "num_rows": Effect(
            "output",
            "test_pipeline.py::test_num_rows_limits_the_dataset",
            "only the first rows",
            "the same; where the last of the lines ends is found by reading them once",
        ),
        "version": Effect(
            "files+error",
            "sources/test_own.py::test_without_a_version_nothing_is_kept_and_a_warning_says_so",
            "what the tokens of a source of one's own are kept under; without one they are not",
            "part of what a saved state must agree with",
        ),
        "tokenizer": Effect(
            "output",
            "stages/test_tokenize.py::test_a_dataset_s_own_tokenizer_comes_first_then_the_stage_s_then_the_pipeline_s",
            "the dataset's own tokenizer",
        ),
        "tokenizer_kwargs": Effect(
            "output",
            "stages/test_formats.py::test_tokenizer_kwargs_change_whichever_tokenizer_it_is",
            "changes to whichever it takes",
        ),
        "content_field": Effect(
            "output",
            "stages/test_tokenize.py::test_content_field_and_budget_come_from_the_dataset",
            "what is tokenized",
        ),
        "prompt_field": Effect(
            "output",
            "stages/test_prompt_rows.py::test_prompts_and_completions",
            "two columns in place of content_field",
        ),
        "completion_field": Effect(
            "output",
            "stages/test_prompt_rows.py::test_prompts_and_completions",
            "the second of them, which is trained",
        ),
        "rejected_field": Effect(
            "output",
            "transforms/test_trl_shapes.py::test_a_shape_of_trl_gives_its_tokens_and_masks",
            "pairs: the answer that was not preferred",
            "refused: there are no pairs",
        ),
        "desirable_field": Effect(
            "output",
            "train/test_unpaired.py::test_desirable_answers_become_likelier_than_the_others",
            "whether an answer is desirable, for losses without pairs",
        ),
        "prompt": Effect(
            "output",
            "transforms/test_prompts.py::test_the_engine_gives_what_the_pipeline_stores",
            "how rows become text: see PromptConfig",
        ),
        "train_on": Effect(
            "output",
            "stages/test_prompt_rows.py::test_the_words_of_the_assistant_are_the_targets",
            "which tokens of a conversation are targets",
        ),
        "chat_template": Effect(
            "output",
            "stages/test_prompt_rows.py::test_the_words_of_the_assistant_are_the_targets",
            "how conversations become text",
        ),
        "template_date": Effect(
            "output",
            "stages/test_prompt_rows.py::test_the_cache_is_used_again_and_not_for_another_template",
            "the day that templates are told",
        ),
        "train_on_eos": Effect(
            "output+error",
            "transforms/test_trl_shapes.py::test_which_ends_of_turns_are_trained",
            "whether what ends a trained turn is a target",
        ),
        "message_fields": Effect(
            "output+error",
            "transforms/test_trl_shapes.py::test_messages_with_other_keys",
            "the keys that messages have for OpenAI's",
        ),
        "chat_template_kwargs": Effect(
            "output+error",
            "transforms/test_trl_shapes.py::test_chat_template_kwargs_of_rows_and_of_datasets",
            "what templates receive in addition to messages",
        ),
        "train_empty_thinking": Effect(
            "output+error",
            "transforms/test_prompts.py::test_train_empty_thinking",
            "whether a thought without words is a target",
        ),
        "tools_field": Effect(
            "output",
            "stages/test_prompt_rows.py::test_tools_reach_the_template",
            "the tools that templates are told",
        ),
        "length": Effect(
            "output+error",
            "transforms/test_lengths.py::test_the_default_is_what_max_length_always_did",
            "what becomes of long documents",
        ),
        "format_fields": Effect(
            "output",
            "stages/test_formats.py::test_format_fields_renames",
            "columns renamed before anything else",
        ),
        "format_callback": Effect(
            "output",
            "stages/test_formats.py::test_format_callback_makes_the_text",
            "called once for each row, when it is tokenized",
            "called each time a row is read",
        ),
        "format_columns": Effect(
            "output+error",
            "stages/test_formats.py::test_format_columns_announces_what_is_added",
            "types of the columns that it adds",
        ),
        "format_batched": Effect(
            "output+cost",
            "stages/test_formats.py::test_format_batched",
            "it takes batches of columns",
        ),
        "format_version": Effect(
            "files",
            "stages/test_formats.py::test_format_version_decides_what_is_kept",
            "what the callback's tokens are kept under; without one they are not",
            "part of what a saved state must agree with",
        ),
        "additional_fields": Effect(
            "files",
            "stages/test_formats.py::test_additional_fields_stay_beside_saved_tokens",
            "columns beside the tokens of saved documents",
            "left behind, with a warning",
        ),
        "aligned_columns": Effect(
            "output+error",
            "loader/test_aligned.py::test_values_stand_where_their_tokens_do",
            "columns of values that are in batches beside their tokens",
        ),
        "cache_path": Effect(
            "files",
            "stages/test_formats.py::test_cache_path_is_the_dataset_s_own",
            "the dataset's own cache folder",
            "where indexes of counted formats are kept; no tokens",
        ),
        "cache_enabled": Effect(
            "files+cost",
            "stages/test_formats.py::test_without_a_cache_nothing_is_left",
            "False keeps no tokens and no indexes: a temporary folder for this process",
            f"False keeps no indexes of counted formats either; {ONCE}",
        ),
        "on_error": Effect(
            "error+files",
            "test_pipeline.py::test_bad_rows_are_counted_and_set_aside",
            "bad rows stop, are counted, or are written to a file",
            "the same, but for 'quarantine', which is refused",
        ),
        "max_bad_rows": Effect(
            "error",
            "stages/test_cache_writer.py::test_the_budget_is_charged_in_shard_order",
            "stop at the first bad row after so many, over all shards in order",
            "the same, each counted once in the run; of several processes each counts its own "
            "streams, and what a restored state has counted",
        ),
        "save_path": Effect(
            "files",
            "stages/test_save.py::test_each_dataset_has_its_own_folder_or_save_path",
            "the dataset's folder",
            NO_SAVE,
        ),
        "save_format": Effect(
            "files",
            "stages/test_save.py::test_each_dataset_has_its_own_folder_or_save_path",
            "the dataset's format",
            NO_SAVE,
        ),
        "storage_options": Effect(
            "output",
            "sources/test_remote.py::test_configs_keep_no_storage_options",
            "passed to fsspec",
        ),
    },
    "HoldOutConfig": {
        "fraction": Effect(
            "output",
            "stages/test_hold_out.py::test_the_two_sides_are_disjoint_and_stable",
            "of the rows, about",
        ),
        "seed": Effect(
            "output",
            "stages/test_hold_out.py::test_the_two_sides_are_disjoint_and_stable",
            "which rows are held out",
        ),
        "held": Effect(
            "output",
            "stages/test_hold_out.py::test_the_two_sides_are_disjoint_and_stable",
            "which side is read",
        ),
    },
    "PromptConfig": {
        "format_type": Effect(
            "output",
            "transforms/test_prompts.py::test_the_engine_gives_what_the_pipeline_stores",
            "what a row is, and how it becomes text",
        ),
        "template": Effect(
            "output+error",
            "transforms/test_prompts.py::test_template_input_columns_and_label_column_say_what_is_written",
            "the chat template, or the text with columns in it",
        ),
        "input_columns": Effect(
            "output",
            "transforms/test_prompts.py::test_template_input_columns_and_label_column_say_what_is_written",
            "what is read in addition to the label",
        ),
        "label_column": Effect(
            "output",
            "transforms/test_prompts.py::test_template_input_columns_and_label_column_say_what_is_written",
            "the column that is trained",
        ),
        "rejected_column": Effect(
            "output",
            "stages/test_pair_rows.py::test_a_document_is_both_answers_as_the_engine_writes_them",
            "pairs",
            "refused: there are no pairs",
        ),
        "desirable_column": Effect(
            "output",
            "train/test_unpaired.py::test_desirable_answers_become_likelier_than_the_others",
            "whether an answer is desirable",
        ),
        "tools_column": Effect(
            "output",
            "transforms/test_prompts.py::test_tools_column_system_prompt_and_template_date",
            "the tools that templates are told",
        ),
        "roles": Effect(
            "output+error",
            "transforms/test_prompts.py::test_the_engine_gives_what_the_pipeline_stores",
            "what ShareGPT's `from` says to which role",
        ),
        "system_prompt": Effect(
            "output",
            "transforms/test_prompts.py::test_tools_column_system_prompt_and_template_date",
            "the system message of conversations without one, or text in front",
        ),
        "few_shot": Effect(
            "output",
            "transforms/test_prompts.py::test_few_shot_examples_stand_in_front_and_are_never_trained",
            "see FewShotConfig",
        ),
        "train_on": Effect(
            "output",
            "transforms/test_prompts.py::test_train_on_and_the_train_flags_of_messages",
            "which turns, or how much of a text, are targets",
        ),
        "roles_to_train": Effect(
            "output+error",
            "transforms/test_trained_turns.py::test_the_turns_of_these_roles_are_trained",
            "whose turns are targets",
        ),
        "reasoning": Effect(
            "output+error",
            "transforms/test_trained_turns.py::test_a_sample_for_each_turn_whose_reasoning_is_dropped_later",
            "whether what messages think is trained, and how many samples a row becomes",
        ),
        "template_date": Effect(
            "output+error",
            "transforms/test_prompts.py::test_tools_column_system_prompt_and_template_date",
            "the day that templates are told",
        ),
        "train_on_eos": Effect(
            "output+error",
            "transforms/test_trl_shapes.py::test_which_ends_of_turns_are_trained",
            "whether what ends a trained turn is a target",
        ),
        "message_fields": Effect(
            "output+error",
            "transforms/test_trl_shapes.py::test_messages_with_other_keys",
            "the keys that messages have for OpenAI's",
        ),
        "chat_template_kwargs": Effect(
            "output+error",
            "transforms/test_trl_shapes.py::test_chat_template_kwargs_of_rows_and_of_datasets",
            "what templates receive in addition to messages",
        ),
        "train_empty_thinking": Effect(
            "output+error",
            "transforms/test_prompts.py::test_train_empty_thinking",
            "whether a thought without words is a target",
        ),
    },
    "FewShotConfig": {
        "examples": Effect(
            "output",
            "transforms/test_prompts.py::test_few_shot_examples_stand_in_front_and_are_never_trained",
            "solved rows in front of every row",
        ),
        "data_files": Effect(
            "output+memory",
            "transforms/test_prompts.py::test_few_shot_draws_from_data_files_by_seed_and_row",
            "a file of rows that they are drawn from",
        ),
        "count": Effect(
            "output",
            "transforms/test_prompts.py::test_few_shot_draws_from_data_files_by_seed_and_row",
            "how many are drawn for a row",
        ),
        "seed": Effect(
            "output",
            "transforms/test_prompts.py::test_few_shot_draws_from_data_files_by_seed_and_row",
            "which are drawn",
        ),
        "separator": Effect(
            "output",
            "transforms/test_prompts.py::test_few_shot_examples_stand_in_front_and_are_never_trained",
            "what is put between them in texts without messages",
        ),
    },
    "LengthPolicy": {
        "policy": Effect(
            "output+error",
            "transforms/test_lengths.py::test_no_policy_gives_too_much_and_masks_travel_with_tokens",
            "what becomes of documents with more than max_length tokens",
        ),
        "overlap": Effect(
            "output",
            "transforms/test_lengths.py::test_split_gives_several_documents_of_a_row_and_trains_each_token_once",
            "tokens that a piece has of the one before it",
        ),
        "boundary": Effect(
            "output",
            "transforms/test_lengths.py::test_boundary_says_where_a_cut_may_be",
            "cuts where a sentence, a clause or a word ends",
        ),
        "budgets": Effect(
            "output",
            "transforms/test_lengths.py::test_budgets_cut_columns_before_the_prompt_is_written",
            "most tokens of single columns of a prompt",
        ),
    },
    "TokenFilesConfig": {
        "dtype": Effect(
            "output", "sources/test_tokens.py::test_separated", "the integers of raw files"
        ),
        "separator_id": Effect(
            "output", "sources/test_tokens.py::test_separated", "the token that ends every document"
        ),
        "document_tokens": Effect(
            "output",
            "sources/test_tokens.py::test_fixed_lengths",
            "tokens of every document, in place of that",
        ),
    },
    "TokenizerConfig": {
        "name_or_path": Effect(
            "output",
            "transforms/test_tokenizer.py::test_a_near_name_is_proposed_and_works",
            "which tokenizer",
        ),
        "max_length": Effect(
            "output",
            "stages/test_cache_writer.py::test_special_tokens_and_truncation_are_counted",
            "documents are cut off, and counted",
        ),
        "truncation": Effect(
            "output",
            "transforms/test_tokenizer.py::test_without_truncation_max_length_cuts_nothing",
            "False: max_length cuts nothing",
        ),
        "padding": Effect(
            "output",
            "test_pipeline.py::test_documents_are_loaded_unpacked_as_their_tokenizer_pads_them",
            "how rows that are not packed are filled",
        ),
        "padding_side": Effect(
            "output+error",
            "loader/test_lengths.py::test_padding_on_the_left_moves_every_column",
            "on which side; refused where rows are packed",
        ),
        "pad_to_multiple_of": Effect(
            "output+error",
            "loader/test_lengths.py::test_widths_are_multiples_or_buckets",
            "the longest row is rounded up; refused where rows are packed",
        ),
        "length_buckets": Effect(
            "output+error",
            "loader/test_lengths.py::test_an_epoch_has_no_more_shapes_than_buckets",
            "the only widths that batches have, or how many are chosen; refused where rows are "
            "packed",
        ),
        "add_special_tokens": Effect(
            "output",
            "transforms/test_tokenizer.py::test_special_tokens_come_from_the_post_processor",
            "what the post-processor adds",
        ),
        "special_strings": Effect(
            "output+error",
            "transforms/test_special.py::test_every_policy_in_the_cache_and_beside_it",
            "special tokens in raw text, ordinary text, or bad rows; counted",
        ),
        "return_attention_mask": Effect(
            "output",
            "test_pipeline.py::test_documents_are_loaded_unpacked_as_their_tokenizer_pads_them",
            "batches have attention_mask",
        ),
        "trust_remote_code": Effect(
            "error", "transforms/test_tokenizer.py::test_options_are_checked", "True is refused"
        ),
        "backend": Effect(
            "cost+error",
            "transforms/test_tokenizer.py::test_the_backend_says_what_and_why",
            "what encodes; never what comes out",
        ),
    },
    "TokenizeStageConfig": {
        "default_tokenizer": Effect(
            "output",
            "stages/test_tokenize.py::test_a_dataset_s_own_tokenizer_comes_first_then_the_stage_s_then_the_pipeline_s",
            "the tokenizer of datasets without one, before the pipeline's",
        ),
        "max_length": Effect(
            "output",
            "stages/test_tokenize.py::test_max_length_of_the_stage_is_for_tokenizers_without_their_own",
            "of tokenizers without one",
        ),
        "batch_size": Effect(
            "memory+cost",
            "stages/test_tokenize.py::test_batch_size_is_how_many_texts_go_at_a_time",
            "texts encoded at a time",
        ),
        "num_workers": Effect(
            "threads",
            "test_options.py::test_num_workers_is_how_many_ranges_are_in_work",
            "ranges of rows that are tokenized at a time",
            "threads that read and tokenize ahead",
        ),
        "cache_tokenized": Effect(
            "files+cost",
            "stages/test_formats.py::test_without_a_cache_nothing_is_left",
            "False keeps no tokens of any dataset",
            f"no tokens are kept: {ONCE}; True is overruled, with a warning",
        ),
        "remove_columns": Effect(
            "files",
            "stages/test_formats.py::test_remove_columns_keeps_the_others",
            "which columns are not kept beside saved tokens",
            NO_SAVE,
        ),
    },
    "MixStageConfig": {
        "weights": Effect(
            "output",
            "stages/test_mix_pack.py::test_shares_hold_at_every_prefix",
            "shares that hold within one document at every prefix",
            "the same, in each stream",
        ),
        "weight_schedule": Effect(
            "output",
            "loader/test_streaming_options.py::test_weights_change_at_the_batch_of_the_step",
            "weights by training step",
            "the same; the windows of each stream end where weights change",
        ),
        "weight_schedule_type": Effect(
            "output", "loader/test_streaming_options.py::test_weights_go_over", "how they go over"
        ),
        "batch_size": Effect(
            "output+error",
            "stages/test_mix_schedule.py::test_the_batch_size_comes_from_load_whoever_names_it",
            "rows of a training step, for the schedule",
        ),
        "unit": Effect(
            "output",
            "loader/test_streaming_options.py::test_shares_of_tokens_hold",
            "shares of documents, or of tokens",
            "the same, in each stream",
        ),
        "max_epochs": Effect(
            "output",
            "loader/test_streaming_options.py::test_a_capped_dataset_leaves_and_the_others_go_on",
            "how often a document may come",
            "the same: passes of each stream over its share",
        ),
        "block_size": Effect(
            "output",
            "stages/test_mix_pack.py::test_a_block_holds_whole_shares",
            "whole shares in every block of documents",
            "the same, in each stream",
        ),
        "stop_strategy": Effect(
            "output",
            "test_options.py::test_stop_strategy_decides_when_a_mixture_ends",
            "when the mixture ends, over the whole data",
            "when a stream ends, over its own share of the data",
        ),
        "seed": Effect(
            "output",
            "stages/test_mix_pack.py::test_the_mixture_has_a_seed_of_its_own",
            "the order of the mixture",
        ),
        "allow_mixed_tokenizers": Effect(
            "error",
            "stages/test_mix_pack.py::test_two_tokenizers_in_one_mixture",
            "lets two tokenizers through, with a warning",
        ),
        "provenance": Effect(
            "output",
            "stages/test_mix_schedule.py::test_provenance_survives_packing_and_saving",
            "packed rows say where segments came from",
            "refused: nothing is saved, and batches have no column of it",
        ),
    },
    "WeightSchedulePoint": {
        "step": Effect(
            "output",
            "stages/test_mix_schedule.py::test_weights_change_at_the_batch_of_the_step",
            "the training step",
        ),
        "weights": Effect(
            "output",
            "stages/test_mix_schedule.py::test_weights_change_at_the_batch_of_the_step",
            "weights from there on",
        ),
    },
    "PackStageConfig": {
        "enabled": Effect(
            "output",
            "stages/test_mix_pack.py::test_disabled_pack_changes_nothing",
            "False leaves documents as they are",
        ),
        "seq_length": Effect(
            "output",
            "test_pipeline.py::test_a_stage_takes_its_own_config_in_place_of_the_pipelines",
            "slots of a row",
        ),
        "strategy": Effect(
            "output",
            "plan/test_pack.py::test_fill",
            "how documents are laid into rows, window by window",
            "the same, in the windows of each stream; with `concat` each canonical stream is one "
            "run",
        ),
        "segments": Effect(
            "output",
            "stages/test_pack_stream.py::test_in_order_it_is_the_text_from_the_first_file_to_the_last",
            "of strategy `concat`: what sees each other, and what is a label",
        ),
        "num_packers": Effect(
            "output",
            "test_options.py::test_num_packers_fills_rows_better",
            "open rows of `pool`; elsewhere a warning",
        ),
        "oversize": Effect(
            "output+error",
            "stages/test_mix_pack.py::test_long_documents",
            "what becomes of a document longer than a row",
        ),
        "train_continued": Effect(
            "output+error",
            "stages/test_prompt_rows.py::test_documents_longer_than_a_row_keep_their_masks",
            "pieces of conversations behind the first keep their targets",
        ),
        "eos_token_id": Effect(
            "output",
            "stages/test_mix_pack.py::test_eos_is_added_once",
            "ends documents that do not end with it",
        ),
        "pad_token_id": Effect(
            "output",
            "stages/test_mix_pack.py::test_pad_outside_the_vocabulary",
            "fills the rest of a row",
        ),
        "include_segment_ids": Effect(
            "output",
            "test_options.py::test_include_segment_ids_false_leaves_the_column_out",
            "False leaves the column out of batches",
        ),
        "shuffle_buffer_factor": Effect(
            "output+error",
            "test_options.py::test_shuffle_buffer_factor_permutes_within_blocks_of_batches",
            "rows are permuted within blocks of so many batches, over the borders of windows",
            "refused: load.shuffle_buffer_size is the window in which documents are shuffled",
        ),
        "shuffle_packed": Effect(
            "output",
            "test_options.py::test_shuffle_packed_moves_rows_and_changes_none",
            "rows are permuted within a window",
            "within a window of their stream",
        ),
    },
    "SaveStageConfig": {
        "enabled": Effect(
            "files",
            "stages/test_save.py::test_disabled_save_writes_nothing",
            "False writes nothing",
        ),
        "output_dir": Effect(
            "files",
            "stages/test_save.py::test_each_dataset_has_its_own_folder_or_save_path",
            "where to",
        ),
        "format": Effect(
            "files", "stages/test_save.py::test_packed_rows_read_back_as_they_were", "of the files"
        ),
        "compression": Effect(
            "files", "stages/test_save.py::test_codecs_that_a_format_does_not_have", "of the files"
        ),
        "num_shards": Effect(
            "files",
            "stages/test_save.py::test_with_both_options_the_stricter_wins",
            "how many files",
        ),
        "max_shard_size": Effect(
            "files",
            "stages/test_save.py::test_files_take_what_max_shard_size_says",
            "bytes of a file on disk",
        ),
        "overwrite": Effect(
            "files+error",
            "stages/test_save.py::test_another_run_is_refused_until_overwrite_replaces_it",
            "replaces what another run left",
        ),
        "storage_options": Effect(
            "files", "interop/test_hub.py::test_nothing_private_is_published", "passed to fsspec"
        ),
        "push_to_hub": Effect(
            "files",
            "interop/test_hub.py::test_a_pushed_folder_loads_again_from_the_hub",
            "the folder goes to the Hub",
        ),
        "hub_repo_id": Effect(
            "files+error", "interop/test_hub.py::test_options_that_make_no_sense", "the repository"
        ),
        "hub_private": Effect(
            "files+error",
            "interop/test_hub.py::test_private_rows_do_not_go_to_a_public_repository",
            "a private one",
        ),
        "hub_token": Effect("error", "interop/test_hub.py::test_refused_tokens", "who pushes"),
        "hub_revision": Effect(
            "files", "interop/test_hub.py::test_a_branch_of_ones_own", "the branch"
        ),
    },
    "LoadStageConfig": {
        "batch_size": Effect(
            "output",
            "loader/test_loader.py::test_a_batch_is_a_stretch_of_rows",
            "rows of a batch, over all processes",
        ),
        "batch_size_schedule": Effect(
            "output",
            "loader/test_steps.py::test_batches_have_the_size_of_their_step",
            "batch sizes by step",
            "the same; num_streams divides every size",
        ),
        "accumulation_steps": Effect(
            "output",
            "loader/test_steps.py::test_micro_batches_are_the_rows_of_the_plain_batch",
            "batches cut into micro-batches",
        ),
        "prefetch_enabled": Effect(
            "threads",
            "loader/test_loader.py::test_without_prefetch_there_are_no_threads",
            "batches are made ahead",
        ),
        "prefetch_workers": Effect(
            "threads",
            "test_options.py::test_prefetch_workers_are_threads",
            "threads that make batches",
            "above 1: threads that make the next window of each stream ahead; tokenize.num_workers "
            "are those that read",
        ),
        "prefetch_buffer_size": Effect(
            "memory",
            "test_options.py::test_prefetch_buffer_size_bounds_what_is_made_ahead",
            "batches made ahead at most",
        ),
        "shuffle_buffer_size": Effect(
            "output",
            "loader/test_loader.py::test_the_shuffle_buffer_permutes_within_its_blocks",
            "rows are permuted within blocks of so many, on top of the permutation of all "
            "documents",
            "documents that are permuted together in each stream: the window",
        ),
        "group_by_length": Effect(
            "output+error",
            "loader/test_lengths.py::test_groups_have_less_padding_and_every_row_once",
            "rows of like length in one batch; refused where rows are packed",
            "refused: rows come in the order in which they are read",
        ),
        "drop_last": Effect(
            "output",
            "loader/test_loader.py::test_a_short_batch_on_a_mesh_is_filled_with_rows_that_weigh_nothing",
            "leaves out the last batch where it is not full",
            "ends before the one batch that is not full, behind the end of all streams",
        ),
        "prefetch_to_device": Effect(
            "memory",
            "loader/test_placement.py::test_without_a_mesh_batches_are_numpy_and_with_one_they_are_jax",
            "batches lie on devices",
        ),
        "num_epochs": Effect(
            "output",
            "test_pipeline.py::test_several_epochs_and_endless_data",
            "passes over the data",
            "passes of each stream",
        ),
        "source_ids": Effect(
            "output",
            "loader/test_aligned.py::test_values_stand_where_their_tokens_do",
            "batches say which dataset each token is of",
        ),
        "mesh": Effect(
            "memory", "loader/test_placement.py::test_meshes_of_eight_devices", "where batches lie"
        ),
        "partition_spec": Effect(
            "memory",
            "loader/test_placement.py::test_meshes_of_eight_devices",
            "how batches lie there",
        ),
        "stall_timeout_s": Effect(
            "error",
            "loader/test_loader.py::test_a_stall_is_named_and_is_not_the_end",
            "how long a batch may take",
        ),
    },
}
