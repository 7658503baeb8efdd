import pytest

from kvzip_press.pretrained.terminal import format_report, human_bytes, human_seconds, side_by_side


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


def test_empty_answer_is_said():
    assert side_by_side("", "x", 40)[0].startswith("(nothing)")


def test_a_word_longer_than_the_column_is_broken():
    assert all(len(line) <= 40 for line in side_by_side("a" * 100, "b" * 50, 40))


@pytest.mark.parametrize("width", [10, 40, 80, 300])
def test_report_fits_the_terminal(width):
    measure = {
        "bytes": 12_345_678,
        "kept_fraction": 0.3,
        "prefill_seconds": 123.4,
        "compress_seconds": 12.3,
        "decode_seconds_per_token": None,
    }
    answer = {"text": "The height of the tower is 42 metres, as far as anybody knows. " * 3}
    report = {
        "document": "a/long/path/to/some/document.txt",
        "tokens": 1498,
        "model": "some-owner/some-model",
        "full": measure,
        "compressed": measure,
        "answers": [{"question": "What is the height of the tower? " * 5, "full": answer, "compressed": answer}],
    }
    text = format_report(report, width)
    assert max(map(len, text.splitlines())) <= max(42, min(width, 120))
    assert "1,498" in text
    assert "11.8 MiB" in text
