"""Figures worked out by hand."""

import pytest
from report_records import record

from kvzip_press.eval.command.console import score_tables
from kvzip_press.eval.report.format import Table, markdown
from kvzip_press.eval.report.summary import summarise
from kvzip_press.eval.report.tables import all_tables, provenance_facts


def records_of(task, press, ratio, scores, **changes):
    return [record(task, f"{i}", press, ratio, [score], **changes) for i, score in enumerate(scores)]


def two_tasks():
    return [
        *records_of("one", "full", 1.0, [1, 1, 0, 1]),
        *records_of("one", "kvzip", 0.3, [1, 0, 0, 1]),
        *records_of("two", "full", 1.0, [0.5, 0.5]),
        *records_of("two", "kvzip", 0.3, [0.5, 0.25]),
    ]


def cell_of(summary, task, press, ratio=0.3):
    (cell,) = [cell for cell in summary.cells if (cell.task, cell.press, cell.ratio) == (task, press, ratio)]
    return cell


def rows_of(tables, section, title=""):
    (table,) = [table for table in tables if (table.section, table.title) == (section, title)]
    return table.rows


def test_scores_differences_and_shares():
    summary = summarise(two_tasks())
    full, cell = cell_of(summary, "one", "full", 1.0), cell_of(summary, "one", "kvzip")
    assert (full.samples, full.score, full.error) == (4, 0.75, pytest.approx(0.25))
    assert (cell.score, cell.error) == (0.5, pytest.approx((1 / 3) ** 0.5 / 2))
    difference, low, high = cell.difference
    assert -1 <= low < difference == -0.25 < high <= 0
    # Residuals of score - 2/3 of the full cache's: 1/3, -2/3, 0, 1/3.
    assert cell.relative == pytest.approx(2 / 3)
    assert cell.relative_error == pytest.approx((2 / 9) ** 0.5 / 2 / 0.75)
    assert full.difference is None and full.relative == 1


def test_relative_average_over_tasks():
    (average,) = summarise(two_tasks()).averages
    assert (average.tasks, average.relative) == (2, pytest.approx((2 / 3 + 3 / 4) / 2))
    assert average.error == pytest.approx(((2 / 9 / 4 / 0.75**2) + 0.25**2) ** 0.5 / 2)
    rows = rows_of(all_tables(summarise(two_tasks()), {}), "Relative average")
    assert rows == [("kvzip", "0.708 ± 0.201", "–")]


@pytest.mark.parametrize(("full", "ours", "relative"), [([0, 0], [0, 1], None), ([0, 0, 0, 0.25], [0, 0, 0, 1], 4)])
def test_tasks_that_the_full_cache_fails_are_in_no_average(full, ours, relative):
    """Neither what is 0 nor what is not told from 0: a division by noise would outweigh all other tasks."""
    failed = records_of("three", "full", 1.0, full) + records_of("three", "kvzip", 0.3, ours)
    summary = summarise(two_tasks() + failed)
    assert [average.tasks for average in summary.averages] == [2]
    cell = cell_of(summary, "three", "kvzip")
    assert (cell.relative, cell.difference[0]) == (relative, (sum(ours) - sum(full)) / len(full))
    assert all_tables(summary, {})[0].note.endswith("which are here: three.")


def test_an_unfinished_run_says_how_far_it_is():
    summary, run = summarise(two_tasks()), {"planned cells": 20}
    assert "unfinished: 12 of 20 cells" in provenance_facts(summary, run)
    assert all_tables(summary, run)[0].note.endswith("The run is unfinished: 12 of 20 cells.")
    assert "unfinished" not in all_tables(summary, {"planned cells": 12})[0].note


def test_a_single_context_has_no_error_and_counts():
    summary = summarise(records_of("one", "full", 1.0, [1]) + records_of("one", "kvzip", 0.3, [0.5]))
    assert [(average.tasks, average.relative, average.error) for average in summary.averages] == [(1, 0.5, None)]


def test_only_the_same_contexts_are_compared():
    """A context that the full cache was not asked about counts in the mean, not in the difference."""
    summary = summarise([*two_tasks(), record("one", "9", "kvzip", 0.3, [1])])
    cell = cell_of(summary, "one", "kvzip")
    assert (cell.samples, cell.score) == (5, 0.6)
    assert (cell.difference[0], cell.relative) == (-0.25, pytest.approx(2 / 3))
    row = rows_of(all_tables(summary, {}), "Scores", "one")[0]
    assert row[1].startswith("0.600")


@pytest.mark.parametrize(
    "other", [{"context_sha256": "b"}, {"questions_sha256": "b"}, {"max_new_tokens": [1]}, {"instruction": "Think."}]
)
def test_samples_of_one_name_that_hold_something_else_are_not_compared(other):
    """Another corpus, an edited file or shortened answers give samples of the same name."""
    made = {"context_sha256": "a", "questions_sha256": "a", "max_new_tokens": [8], "instruction": ""}
    full = [record("one", sample, "full", 1.0, [1], identity=made) for sample in "01"]
    ours = [record("one", sample, "kvzip", 0.3, [1], identity=made | other) for sample in "01"]
    summary = summarise(full + ours)
    assert summary.tasks == ["one, data 1", "one, data 2"]
    assert (summary.averages, summary.replaced) == ([], 0)
    assert cell_of(summary, "one, data 2", "kvzip").difference is None


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ({"model": {"weights": "a1"}}, {"model": {"weights": "b2"}}, ("weights a1", "weights b2")),
        ({"window": None}, {"window": 2048}, ("window None", "window 2048")),
        ({"backend": "cpu"}, {"backend": "torch"}, ("backend cpu", "backend torch")),
    ],
)
def test_models_and_kernels_that_differ_are_not_compared(one, other, names):
    """Two models may be in folders of one name."""
    full = record("one", "0", "full", 1.0, [1], identity=one)
    summary = summarise([full, record("one", "0", "kvzip", 0.3, [1], identity=other)])
    assert summary.settings == [f"SmolLM2-135M-Instruct, {name}" for name in names]
    assert summary.averages == []


def test_a_line_that_is_no_whole_record_is_named():
    with pytest.raises(ValueError, match="the record 'abc' has no model, task, .* delete its line from samples.jsonl"):
        summarise([*two_tasks(), {"key": "abc"}])


def test_without_a_full_cache_nothing_is_compared():
    cell = summarise(records_of("one", "kvzip", 0.3, [1, 0])).cells[0]
    assert (cell.difference, cell.relative, cell.relative_cost["cache_bytes"]) == (None,) * 3
    assert summarise([record("one", "0", "kvzip", 0.3, [1])]).cells[0].error is None


def test_costs_are_means_and_multiples():
    slow = {"prefill": 3.0, "score": 1.0, "evict": 0.5, "answer": 1.0}
    small = record("one", "0", "kvzip", 0.3, [1], cache_bytes=2**18, kept=0.25)
    large = record("one", "1", "kvzip", 0.3, [1], cache_bytes=2**19, kept=0.35, seconds=slow)
    summary = summarise([*records_of("one", "full", 1.0, [1, 1]), small, large])
    cell = cell_of(summary, "one", "kvzip")
    assert cell.kept == pytest.approx(0.3)
    assert (cell.cost["cache_bytes"], cell.relative_cost["cache_bytes"]) == (1.5 * 2**18, 0.375)
    assert (cell.cost["prefill"], cell.cost["compression"], cell.cost["answer"]) == (2.5, 1.5, 2.5)
    # Prefill and compression, by the full cache's prefill of 2 s; its answers take 4 s.
    assert (cell.relative_cost["compression"], cell.relative_cost["answer"]) == (2.0, 0.625)
    row = rows_of(all_tables(summary, {}), "All figures", "one")[1]
    assert row[:7] == ("kvzip", "0.3", "2", "0.300", "1.000 ± 0.000", "+0.000 [+0.000, +0.000]", "1.000")
    # 4 s and 1 s for 8 tokens each.
    assert cell.cost["token"] == 2.5 / 8 and cell.relative_cost["token"] == 0.625
    assert row[7:] == ("0.4", "0.38", "2.50", "1.50", "2.50", "312.5")


def test_a_press_holds_down_to_the_last_ratio_before_it_falls():
    full = records_of("one", "full", 1.0, [1] * 20)
    shares = {0.9: 20, 0.5: 19, 0.3: 18, 0.1: 20}
    cells = [records_of("one", "kvzip", ratio, [1] * right + [0] * (20 - right)) for ratio, right in shares.items()]
    summary = summarise([*full, *sum(cells, []), *records_of("one", "knorm", 0.9, [0] * 20)])
    assert summary.held_to(summary.settings[0], "kvzip") == 0.5
    assert summary.held_to(summary.settings[0], "knorm") is None


def test_settings_and_lengths_are_kept_apart():
    made = [
        *records_of("one", "kvzip", 0.3, [1], protocol="aware"),
        *records_of("one", "kvzip", 0.3, [0]),
        *records_of("one", "kvzip", 0.3, [0], length=8192),
        *records_of("two", "kvzip", 0.3, [0]),
    ]
    summary = summarise(made)
    assert summary.settings == [f"SmolLM2-135M-Instruct, protocol {name}" for name in ("aware", "agnostic")]
    assert summary.tasks == ["one, length 4096", "one, length 8192", "two"]
    assert len(summary.cells) == 4 and {cell.samples for cell in summary.cells} == {1}
    assert {table.section for table in all_tables(summary, {})} >= {f"Scores ({name})" for name in summary.settings}


def test_a_repeated_record_replaces_the_earlier_one():
    summary = summarise([record("one", "0", "kvzip", 0.3, [0]), record("one", "0", "kvzip", 0.3, [1])])
    assert (summary.cells[0].samples, summary.cells[0].score, summary.replaced) == (1, 1, 1)
    assert ("records replaced by later ones", "1") in rows_of(all_tables(summary, {}), "Provenance")


def test_skipped_contexts_are_listed_and_in_no_mean():
    reason = "longer than the model's window | 2048"
    skipped = [record("one", f"{i}", "kvzip", 0.3, [], skipped=reason, questions=[]) for i in (7, 8)]
    summary = summarise([*two_tasks(), *skipped])
    assert cell_of(summary, "one", "kvzip").samples == 4
    assert rows_of(all_tables(summary, {}), "Skipped") == [("one", "kvzip", "0.3", reason, "2")]
    rows = rows_of(all_tables(summary, {"left_out": {"squad": "no data"}}), "Skipped")
    assert rows[1:] == [("squad", "all", "all", "no data", "all")]
    found = rows_of(all_tables(summary, {"left_out": {"squad": "no data", "one": "not on this day"}}), "Skipped")
    assert found == rows, "what has records was had after all"
    assert "longer than the model's window \\| 2048" in markdown("model", all_tables(summary, {}))


def test_fewer_contexts_and_imitations_are_marked():
    made = records_of("one", "full", 1.0, [1, 1, 1], imitation=True)
    made += records_of("one", "kvzip", 0.3, [1, 1], imitation=True)
    tables = all_tables(summarise(made), {})
    assert rows_of(tables, "Scores", "one (imitation)") == [("kvzip", "1.000 ± 0.000 (n 2)")]


def test_missing_cells_are_dashes_and_ratios_rise():
    made = [record("one", "0", press, ratio, [1]) for press, ratio in (("a", 0.5), ("b", 0.1), ("a", 0.3))]
    (table,) = [table for table in all_tables(summarise(made), {}) if table.section == "Scores"]
    assert table.columns == ("press", "0.1", "0.3", "0.5")
    assert table.rows == [("a", "–", "1.000", "1.000"), ("b", "1.000", "–", "–")]


def test_provenance_names_the_machine_the_commits_the_options_and_what_was_saved():
    later = record("one", "1", "full", 1.0, [1], commit="ffff", time="2026-12-01")
    made = [record("one", "0", "full", 1.0, [1]), later]
    run = {"device": "cpu", "versions": {"torch": "2.13.0", "kvpress": None}, "arguments": {"ratios": [0.3, 0.5]}}
    run["saved"] = {"prefills": 12, "replays": 24, "prefills_alone": 700, "replays_alone": 360}
    tables = all_tables(summarise(made), run)
    assert rows_of(tables, "Saved by the sweep") == [("prefills", "12", "700"), ("replays", "24", "360")]
    rows = dict(rows_of(tables, "Provenance"))
    assert rows["versions"] == "torch 2.13.0"
    assert rows["arguments"] == "ratios 0.3 0.5"
    assert rows["commits of the records"] == "0123456789abcdef0123456789abcdef01234567, ffff"
    assert rows["times of the records"] == "2026-11-30T03:00:00+00:00 to 2026-12-01"


def test_privacy_and_fidelity_are_in_no_average():
    made = two_tasks() + records_of("leaks", "full", 1.0, [1]) + records_of("leaks", "kvzip", 0.3, [0])
    for found in made[-2:]:
        found["questions"][0]["metric"] = "leak"
    summary = summarise(made)
    assert [average.tasks for average in summary.averages] == [2]
    assert summary.measures == {"leaks": "leak rate, less is better"}


def test_subtasks_and_drift_have_their_own_tables():
    made = [record("mixed", f"{i}", "kvzip", 0.3, scores) for i, scores in enumerate([[1, 0, 0], [0, 0, 1]])]
    for found in made:
        for question, subtask, kl in zip(found["questions"], ("code", "kv", "kv"), (0.5, 0.1, 0.3), strict=True):
            question["details"] |= {"task": subtask, "kl": kl}
    tables = all_tables(summarise(made), {})
    assert rows_of(tables, "Subtasks", "mixed: code") == [("kvzip", "0.500 ± 0.500")]
    assert rows_of(tables, "Subtasks", "mixed: kv") == [("kvzip", "0.250 ± 0.250")]
    assert rows_of(tables, "Fidelity", "mixed: KL(full, compressed), nats a token") == [("kvzip", "0.300 ± 0.000")]


def test_a_table_in_markdown_and_as_text():
    table = Table(("press", "0.3"), [("a|b", "<b>"), ("c", "1")], "Part", "Title", "About\nit.")
    text = markdown("Name", [table, table])
    assert text.count("## Part\n") == text.count("About it.") == 1 and text.count("### Title") == 2
    rows = "| press | 0.3 |\n| --- | ---: |\n| a\\|b | &lt;b> |\n"
    assert text.startswith(f"# Name\n\n## Part\n\n### Title\n\nAbout it.\n\n{rows}")
    assert table.text() == "press  0.3\na|b    <b>\nc        1"


def test_the_terminal_shows_cells_parts_averages_and_what_was_skipped():
    made = two_tasks() + [record("one", "9", "kvzip", 0.3, [], skipped="too long", questions=[])]
    made[4]["questions"][0]["details"] = {"task": "part", "kl": 0.5}
    lines = score_tables(made).splitlines()
    assert lines[0] == "SmolLM2-135M-Instruct"
    assert {"one: part", "one: KL(full, compressed), nats a token", "Skipped"} <= set(lines)
    assert "task  press  ratio  n   kept          score        minus full [95 %]  of full" in lines
    assert "two   kvzip    0.3  2  0.300  0.375 ± 0.125  -0.125 [-0.250, +0.000]    0.750" in lines
    title = lines.index("Score divided by the full cache's, mean over 2 tasks, by kept fraction")
    assert lines[title + 2 : title + 4] == ["press    0.3", "kvzip  0.708"]
    assert lines[-1] == "one   kvzip  0.3    too long         1" and max(map(len, lines)) <= 100


def test_the_machine_is_known_without_a_note_of_the_run():
    summary = summarise([record("one", "0", "full", 1.0, [1], device="cuda")])
    facts = ["cuda", "float32", "sdpa", "1 task", "0 presses", "1 record", "commit 0123456789", "2026-11-30"]
    assert provenance_facts(summary, {}) == facts
    assert provenance_facts(summary, {"device": "NVIDIA H200"})[:2] == ["NVIDIA H200", "float32"]
