"""Two results files: which cells changed, and which changed beyond noise."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptneo_trt import compare
from gptneo_trt.errors import MetricError
from tests.unit.stored_results import measured_only, stored_results, with_cell

ROWS = {"fp16", "fp8"}
KL = ("fp8", "prefill", "kl_mean_nats")


@pytest.fixture
def before():
    """Return two rows of the stored run, with the KL of each text."""
    found = measured_only(stored_results(), ROWS)
    texts = np.random.default_rng(0).normal(0.0077, 0.001, 12)
    found["token_profiles"] = {"fp8": {"prefill": {"kl_by_text_nats": texts.tolist()}}}
    return found


def named(changes):
    """Return the keys of changes."""
    return [change.key for change in changes]


def test_equal_runs_have_no_change(before):
    """Nothing is listed, and the command succeeds."""
    assert compare.changes(before, copy.deepcopy(before)) == []
    lines = list(compare.table(before, before))
    assert lines[1] == "- nothing"
    assert lines[-1].startswith("0 of ")


def test_a_paired_shift_is_found_where_an_unpaired_one_would_be_missed(before):
    """All texts 2 % worse: a fifth of the standard error over texts, and beyond noise."""
    after = with_cell(before, *KL, obtained=0.00782)
    texts = before["token_profiles"]["fp8"]["prefill"]["kl_by_text_nats"]
    jitter = np.random.default_rng(1).normal(1.02, 0.001, 12)
    shifted = (np.array(texts) * jitter).tolist()
    after["token_profiles"]["fp8"]["prefill"]["kl_by_text_nats"] = shifted

    (change,) = compare.changes(before, after)

    assert change.key == KL
    assert change.significant
    assert change.p < 1e-6
    del after["token_profiles"]
    (unpaired,) = compare.changes(before, after)
    assert not unpaired.significant
    assert unpaired.p > 0.5


def test_another_roll_of_the_dice_is_within_noise(before):
    """Texts that move either way: listed, since the figure differs, and not significant."""
    after = with_cell(before, *KL, obtained=0.0077)
    texts = np.array(before["token_profiles"]["fp8"]["prefill"]["kl_by_text_nats"])
    after["token_profiles"]["fp8"]["prefill"]["kl_by_text_nats"] = (
        texts * (1 + 0.05 * np.array([1, -1] * 6))
    ).tolist()

    (change,) = compare.changes(before, after)

    assert not change.significant


@pytest.mark.parametrize(("factor", "significant"), [(1.01, False), (0.8, True), (1.2, True)])
def test_a_time_ratio_changes_by_more_than_ratios_of_equal_engines_do(before, factor, significant):
    """1 % is between two runs; 20 % is another engine."""
    after = copy.deepcopy(before)
    after["values"]["fp8"]["decode/speedup_x"] *= factor

    changes = compare.changes(before, after)

    key = ("fp8", "decode", "speedup_x")
    assert [(change.key, change.significant) for change in changes] == [(key, significant)]


def test_what_is_timed_without_an_interval_is_unknown(before):
    """Neither beyond noise nor within: it is listed as that, and fails nothing."""
    key = ("fp16", "decode", "alternative/hugging_face_eager_x")
    after = with_cell(before, *key, obtained=44.0)

    (change,) = compare.changes(before, after)

    assert change.significant is None
    (line,) = (line for line in compare.table(before, after) if "hugging_face" in line)
    assert line.endswith("| unknown: timed without an interval |")


def test_a_figure_without_an_error_changed_if_it_differs(before):
    """A plan is larger or it is not."""
    after = with_cell(before, "fp8", "decode", "plan_mib", obtained=8.8)
    (change,) = compare.changes(before, after)
    assert (change.p, change.significant) == (None, True)


def test_a_cell_that_one_run_lacks_is_a_change(before):
    """A vanished cell and a new one are named, with the verdict of the run that has it."""
    after = copy.deepcopy(before)
    for cell in after["cells"]:
        if cell["metric"] == "plan_mib" and cell["phase"] == "decode" and cell["variant"] == "fp8":
            cell["metric"] = "plan_mib_v2"

    changes = compare.changes(before, after)

    assert named(changes) == [("fp8", "decode", "plan_mib"), ("fp8", "decode", "plan_mib_v2")]
    assert [change.verdicts for change in changes] == [("passed", "absent"), ("absent", "passed")]
    assert all(change.significant for change in changes)


def test_another_verdict_is_a_change(before):
    """Of an equal figure too: the limit moved."""
    after = with_cell(before, "fp8", "decode", "build", verdict="failed")
    assert compare.changes(before, after) == []  # of the cache, not of the engine
    after = with_cell(before, "fp8", "decode", "plan_mib", verdict="failed")
    (line,) = (line for line in compare.table(before, after) if "plan_mib" in line)
    assert "(passed)" in line
    assert "(failed)" in line


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_holm_rejects_no_more_than_single_tests_and_no_less_than_bonferroni(p_values):
    """Between the two, and the smallest p-values first."""
    rejected = compare._holm(p_values)
    for p, is_rejected in zip(p_values, rejected, strict=True):
        assert not is_rejected or p <= compare.LEVEL
        assert is_rejected or p > compare.LEVEL / len(p_values)
    kept = [p for p, is_rejected in zip(p_values, rejected, strict=True) if not is_rejected]
    gone = [p for p, is_rejected in zip(p_values, rejected, strict=True) if is_rejected]
    assert not kept or not gone or max(gone) <= min(kept)


def test_comparisons_of_equal_things_seldom_show_a_change(before):
    """Of 100 pairs of noisy runs of 22 rows, at most 10 show one: 5 % are expected."""
    generator, alarms = np.random.default_rng(3), 0
    for _ in range(100):
        pair = generator.normal(0.0077, 0.0004, (2, 22, 12))
        p_values = [compare._paired_p(pair[0, row], pair[1, row]) for row in range(22)]
        alarms += any(compare._holm(p_values))
    assert alarms <= 10


def test_M01_losses_over_other_tokens_are_not_compared(before, tmp_path, capsys):
    """A token a window more or less is refused with both counts, and the command says so."""
    after = copy.deepcopy(before)
    after["values"]["fp8"]["prefill/prose/bf16/scored_tokens"] = 3071.0
    reason = "fp8/prefill/prose/bf16/scored_tokens: 3060 and 3071; compare runs of the same texts"
    for name, results in (("before", before), ("after", after)):
        (tmp_path / f"{name}.json").write_text(json.dumps(results))

    with pytest.raises(MetricError, match=reason):
        compare.changes(before, after)
    with pytest.raises(SystemExit, match="2"):
        compare.main([str(tmp_path / "before.json"), str(tmp_path / "after.json")])
    assert reason in capsys.readouterr().err


def test_command_names_what_the_runs_differ_in(before, tmp_path, capsys):
    """Versions first, then the cells; exit status 1 where one changed beyond noise."""
    after = with_cell(before, "fp8", "decode", "plan_mib", obtained=8.8)
    after["target"] = "h200/tensorrt_rtx-1.5.0.114"
    after["provenance"]["versions"]["torch"] = "9.9"
    for name, results in (("before", before), ("after", after)):
        (tmp_path / f"{name}.json").write_text(json.dumps(results))
    files = [str(tmp_path / "before.json"), str(tmp_path / "after.json")]

    assert compare.main(files) == 1
    told = capsys.readouterr().out
    assert "- target: h200/tensorrt_rtx-1.6.1.120 -> h200/tensorrt_rtx-1.5.0.114" in told
    assert "- torch: 2.11.0 -> 9.9" in told
    assert "| fp8/decode/plan_mib | 8.756 | 8.8 | +0.51 % | beyond noise: counted |" in told
    assert compare.main([files[0], files[0]]) == 0


def test_another_batch_or_context_is_said_first(before):
    """Two runs of other shapes differ in everything: the first lines say why."""
    after = before | {"shape": {"batch": 4, "context": 1024}}

    lines = compare.differences_of_runs(before, after)

    assert lines == ["shape: the baselines' -> batch 4, context 1024"]
