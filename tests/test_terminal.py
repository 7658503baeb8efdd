import pytest

from kvzip_press.terminal import format_report, format_table, human_bytes, human_seconds, side_by_side


def test_table_aligns_numbers_to_the_right_and_text_to_the_left():
    rows = [{"press": "a", "kept": 0.5, "unused": 1}, {"press": "longer", "kept": None}, {"kept": 10.25}]
    assert format_table(rows, {"press": "", "kept": ".2f"}).splitlines() == [
        "press    kept",
        "a        0.50",
        "longer      -",
        "-       10.25",
    ]
    assert format_table([], {"press": "", "kept": ".2f"}) == "press  kept"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (70_444_000, "67.2 MiB"), (5 * 1024**4, "5.0 TiB")],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.841, "3.84 s"), (0.0413, "41.3 ms"), (None, "-"), (float("nan"), "-")]
)
def test_human_seconds(seconds, text):
    assert human_seconds(seconds) == text


def test_columns_keep_to_their_half():
    lines = side_by_side("one two three four five six seven", "short", 24)
    assert all(len(line) <= 24 for line in lines)
    assert lines[0] == "one two      short"
    assert " ".join(line[:11].strip() for line in lines) == "one two three four five six seven"
    assert side_by_side("", "x", 40)[0].startswith("(nothing)")
    # A word longer than the column is broken
    assert all(len(line) <= 40 for line in side_by_side("a" * 100, "b" * 50, 40))


@pytest.mark.parametrize("width", [10, 40, 80, 300])
def test_report_fits_the_terminal(width):
    times = {"prefill_seconds": 123.4, "compress_seconds": 12.3, "decode_seconds_per_token": None}
    measure = {"bytes": 12_345_678, "kept_fraction": 0.3, **times}
    answer = {"text": "The height of the tower is 42 metres, as far as anybody knows. " * 3}
    report = {
        "document": "a/long/path/to/some/document.txt",
        "tokens": 1498,
        "model": "some-owner/some-model",
        "full": {**measure, "compress_seconds": 0.0},
        "compressed": measure,
        "answers": [{"question": "What is the height of the tower? " * 5, "full": answer, "compressed": answer}],
    }
    lines = format_report(report, width).splitlines()
    assert max(map(len, lines)) <= max(42, min(width, 120))
    assert any("1,498" in line for line in lines)
    assert ["compression", "-", "12.30", "s"] in [line.split() for line in lines]
    assert ["cache", "11.8", "MiB", "11.8", "MiB"] in [line.split() for line in lines]
