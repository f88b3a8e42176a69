"""A map: reports of people about packages like this one -> the test that would go red here.

Each is an entry of a list of public issues, boiled down to an input and the right answer. The list
itself is no part of the repository: `cases/reports.md` in the test data.
"""

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("VITLAB_TEST_DATA", ROOT / "../shared"))
REPORTS = DATA / "cases" / "reports.md"

COVERED = {  # number -> tests, `file in tests/`::`function`
    # Decoding
    1: "data/test_decode.py::test_16_bit_gray_in_every_byte_order",
    3: "data/test_sources.py::test_exif_orientation_counts_in_every_kind_of_source"
    " weights/test_predictor.py::test_upright_as_the_camera_meant_it",
    5: "data/test_decode.py::test_cmyk",
    6: "training/test_odd_files.py::test_sets_without_colour"
    " data/test_decode.py::test_bilevel_is_black_and_white",
    7: "training/test_odd_files.py::test_oddities_made_here"
    " data/test_loader.py::test_real_files_that_cannot_be_read_are_skipped_with_reasons",
    8: "training/test_odd_files.py::test_evaluation_training_and_prediction_see_the_same_tensor"
    " data/test_preprocess.py::test_a_checkerboard_becomes_gray",
    9: "data/test_preprocess.py::test_normalisation_constants",
    10: "weights/test_predictor.py::test_every_form_gives_the_same_answer",
    12: "data/test_preprocess.py::test_what_a_centre_crop_squash_and_letterbox_show",
    13: "data/test_trees.py::test_suffixes_count_in_any_case_and_once",
    14: "data/test_trees.py::test_leftovers_are_no_pictures_and_no_classes",
    # Folders and labels
    18: "data/test_trees.py::test_leftovers_are_no_pictures_and_no_classes",
    19: "data/test_trees.py::test_val_may_lack_a_class"
    " data/test_trees.py::test_val_may_not_have_another_class",
    20: "data/test_trees.py::test_empty_classes_are_named"
    " data/test_trees.py::test_no_pictures_at_all"
    " data/test_sources.py::test_what_is_not_there_is_said",
    21: "evaluation/test_scoring.py::test_numeric_names_are_names_and_no_indices",
    23: "test_cli.py::test_data_that_cannot_be_trained_on data/test_trees.py::test_loose_pictures",
    24: "data/test_trees.py::test_nested_class_names_do_not_merge",
    25: "data/test_trees.py::test_order_does_not_depend_on_the_file_system",
    27: "data/test_loader.py::test_a_split_shares_nothing_and_validation_is_never_augmented"
    " training/test_run.py::test_validation_pictures_are_never_trained_on",
    29: "data/test_named.py::test_label_columns_are_never_guessed"
    " data/test_named.py::test_named_columns_are_taken",
    30: "weights/test_bundle.py::test_order_of_class_names_is_kept",
    # Checkpoints
    32: "weights/test_detect.py::test_wrapped_and_prefixed_files_load_fully"
    " weights/test_detect.py::test_names_that_match_nothing_are_an_error",
    33: "weights/test_detect.py::test_state_dicts_of_vitlab_itself"
    " training/test_run.py::test_a_compiled_model_is_saved_under_its_own_names",
    34: "weights/test_detect.py::test_options_beside_the_weights_are_plain_values"
    " weights/test_files.py::test_pickles_are_never_executed"
    " training/test_checkpoint.py::test_nothing_in_it_needs_pickle",
    36: "weights/test_detect.py::test_a_file_from_a_gpu_loads_here"
    " test_cli.py::test_a_gpu_that_is_not_there",
    37: "weights/test_huggingface.py::test_eps_and_gelu_are_fields_of_the_file",
    39: "weights/test_formats.py::test_sizes_come_from_shapes_and_never_from_names",
    40: "weights/test_google.py::test_pre_logits_by_hand"
    " weights/test_google.py::test_a_dropped_head_leaves_features",
    41: "weights/test_formats.py::test_a_head_of_another_size_is_new_only_when_asked"
    " weights/test_bundle.py::test_tensors_that_do_not_fit"
    " evaluation/test_scoring.py::test_classes_that_the_model_does_not_know_are_refused",
    44: "weights/test_timm.py::test_distilled_deit_is_refused_by_name",
    45: "weights/test_formats.py::test_transposed_and_shared_tensors_are_written",
    47: "weights/test_round_trips.py::test_queries_keys_and_values_stay_what_they_are",
    49: "weights/test_formats.py::test_a_position_table_is_read_or_resampled_and_never_random",
    50: "weights/test_timm.py::test_mean_pooled_weights_are_not_read_as_others",
    52: "models/test_vit.py::test_mean_pool_leaves_out_prefix_tokens",
    53: "weights/test_google.py::test_kernels_of_patches_are_transposed",
    # Positions and sizes
    54: "weights/test_formats.py::test_every_entry_takes_another_size"
    " weights/test_formats.py::test_another_size_is_resampled_once_and_said"
    " training/test_run.py::test_another_size",
    55: "models/test_positions.py::test_sizes_that_a_scale_factor_gets_wrong",
    56: "models/test_vit.py::test_resize_of_a_table_without_a_row_for_the_class_token"
    " weights/test_timm.py::test_original_deit3_files",
    59: "models/test_positions.py::test_own_grid_gives_the_same_table"
    " models/test_positions.py::test_bicubic_is_that_of_torch",
    61: "models/test_vit.py::test_images_that_do_not_fit"
    " models/test_vit.py::test_configurations_that_do_not_fit",
    62: "models/test_vit.py::test_images_that_do_not_fit",
    63: "training/test_loop.py::test_what_looks_like_a_mistake_is_told",
    65: "models/test_vit.py::test_resize_of_a_rectangle"
    " weights/test_formats.py::test_rectangles_are_never_taken_for_squares",
    66: "models/test_positions.py::test_height_and_width_of_the_report"
    " models/test_vit.py::test_grid_is_height_first",
    69: "models/test_vit.py::test_resize_in_place",
    # Training
    71: "training/test_loop.py::test_weights_that_are_not_finite_are_never_saved",
    72: "training/test_optim.py::test_clipping_scales_the_global_norm_and_tells_it",
    74: "training/test_run.py::test_the_defaults_learn_two_colours",
    78: "training/test_loop.py::test_what_looks_like_a_mistake_is_told"
    " training/test_run.py::test_the_defaults_learn_two_colours"
    " test_report.py::test_warns_of_one_class",
    79: "training/test_optim.py::test_rates_by_hand",
    81: "training/test_optim.py::test_only_matrices_decay_whatever_the_wrapper",
    83: "training/test_loop.py::test_an_odd_batch_is_mixed"
    " training/test_loop.py::test_mixup_of_a_single_picture_changes_nothing",
    84: "training/test_loop.py::test_hard_loss_by_hand"
    " training/test_loop.py::test_soft_loss_by_hand"
    " training/test_loop.py::test_validation_loss_is_never_smoothed",
    85: "training/test_run.py::test_rates_given_are_taken_as_they_are",
    86: "training/test_optim.py::test_a_slow_average_is_useful_after_a_short_run"
    " training/test_loop.py::test_average_is_scored_and_kept",
    76: "training/test_parallel.py::test_recomputing_changes_no_bit"
    " training/test_tasks.py::test_what_is_frozen_keeps_its_bits",
    # Resuming and several processes
    88: "training/test_parallel.py::test_every_picture_is_evaluated_by_one_process",
    89: "data/test_loader.py::test_an_epoch_is_a_permutation_of_its_own",
    90: "training/test_resume.py::test_a_truncated_checkpoint_falls_back_to_the_one_before"
    " training/test_disk.py::test_a_full_disk_at_each_file",
    92: "training/test_resume.py::test_killed_at_each_kind_of_moment"
    " training/test_folder.py::test_a_changed_option_is_named",
    93: "training/test_run.py::test_the_best_weights_stay_the_best_after_resuming",
    94: "training/test_folder.py::test_a_changed_option_is_named",
    96: "training/test_parallel.py::test_two_processes_learn_what_one_learns",
    98: "data/test_shards.py::test_training_is_the_same_from_any_number_of_workers_and_from_parts",
    # Memory and speed
    100: "weights/test_predictor.py::test_many_files_need_no_more_memory_than_few"
    " evaluation/test_scoring.py::test_results_hold_no_graph",
    102: "training/test_loop.py::test_what_is_logged_are_floats_and_tensors_do_not_pile_up",
    103: "data/test_loader.py::test_a_million_paths_cost_workers_no_memory",
    104: "training/test_loop.py::test_memory_that_runs_out_is_told_with_what_helps"
    " test_cli.py::test_memory_that_runs_out",
    105: "test_cli.py::test_threads_asked_for_are_used",
    107: "data/test_loader.py::test_workers_live_as_long_as_the_stream"
    " training/test_loop.py::test_what_looks_like_a_mistake_is_told"
    " training/test_loop.py::test_history_of_a_run",
    108: "training/test_odd_files.py::test_a_compiled_model_sees_one_shape",
    # Answers
    134: "test_cli.py::test_weights_of_nan_are_an_error_and_no_answer",
    135: "weights/test_predictor.py::test_bf16_weights",
    138: "weights/test_predictor.py::test_top_is_ranked_and_sums_to_one"
    " weights/test_predictor.py::test_counts_below_one_are_refused",
    # The command line
    141: "training/test_config.py::test_numbers_that_yaml_reads_as_text_are_converted",
    143: "test_cli.py::test_switches_say_what_they_mean",
    144: "test_cli.py::test_a_wrong_call_is_one_line"
    " training/test_config.py::test_what_is_wrong_is_named",
    146: "test_cli.py::test_a_wrong_call_is_one_line",
    # Metrics
    147: "evaluation/test_metrics.py::test_no_top5_of_five_classes_or_fewer",
    148: "evaluation/test_scoring.py::test_ten_pictures_are_ten_whatever_the_batch",
    151: "training/test_loop.py::test_history_of_a_run"
    " training/test_loop.py::test_validation_loss_is_never_smoothed",
    152: "evaluation/test_metrics.py::test_rows_are_the_truth_and_no_class_is_forgotten",
    153: "evaluation/test_metrics.py::test_line_and_summary_agree"
    " test_cli.py::test_json_is_one_object_on_stdout",
    # Reproducibility
    155: "data/test_augment.py::test_no_two_workers_epochs_or_seeds_share_draws",
    156: "weights/test_predictor.py::test_neighbours_in_a_batch_do_not_matter",
    158: "weights/test_predictor.py::test_every_form_gives_the_same_answer",
}

MAPS = "no attention maps yet"
EXPORT = "no export to ONNX yet"
SERVER = "no server yet"
LATER = {  # number -> why there is nothing to test so far
    16: "pictures have three channels: no other number can be asked for",
    67: MAPS, 109: MAPS, 111: MAPS, 112: MAPS, 114: MAPS, 115: MAPS, 117: MAPS, 119: MAPS,
    120: EXPORT, 121: EXPORT, 123: EXPORT, 124: EXPORT, 126: EXPORT, 127: EXPORT, 129: EXPORT,
    130: SERVER, 132: SERVER, 136: SERVER, 140: SERVER,
}  # fmt: skip


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("number", COVERED)
def test_the_test_named_exists(number: int) -> None:
    for test in COVERED[number].split():
        file, _, function = test.partition("::")
        assert function in functions(file), test
        assert function.startswith("test_")


def test_each_report_is_covered_or_has_a_reason() -> None:
    assert not COVERED.keys() & LATER.keys()
    assert all(LATER.values())
    if not REPORTS.exists():
        pytest.skip("no list of reports in the test data")
    entries = re.findall(r"^### (\d+) ", REPORTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(entries) > 100
    assert sorted(map(int, entries)) == sorted({**COVERED, **LATER})
