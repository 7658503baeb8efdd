import json
import shlex
import subprocess
import sys

import pytest
from tiny_models import build_model, build_tokenizer
from transformers import LlamaForCausalLM

from kvzip_press import CompressedContext, cli, scoring

WINDOW = 512
TEXT = "The name of the ship was the Silver Heron. The height of the tower is 42 metres.\n"
# Tokens of the chat template before and after a message
BEFORE, AFTER = len("<user:"), len("<<assistant:")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny Llama with one token a character, saved as a model is."""
    folder = tmp_path_factory.mktemp("model")
    model = build_model("llama")
    model.config.max_position_embeddings = WINDOW
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "document.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def run(capsys, model_folder):
    """Run the command with the tiny model, and return status, stdout and stderr."""

    def run(*arguments):
        named = any(str(argument).startswith(("--model", "--version")) for argument in arguments)
        options = [] if named else ["--model", str(model_folder)]
        try:
            status = cli.main([*map(str, arguments), *options])
        except SystemExit as stop:
            status = stop.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def report(run, document):
    """Ask the document a question with some options, and return the JSON object."""

    def report(*options):
        status, out, err = run("ask", document, "-q", "What is it?", "--max-new-tokens", 4, "--json", *options)
        assert status == 0, err
        return json.loads(out)

    return report


def assert_one_line_error(outcome, *parts):
    status, out, err = outcome
    assert status == 2 and out == "" and "Traceback" not in err
    (line,) = (line for line in err.splitlines() if line.startswith("kvzip-press: error: "))
    assert all(part in line for part in parts), line


def test_table(run, document, monkeypatch):
    """Kernels are warmed up before anything is timed: compilation at first use would be in the compressed times."""
    compressed, compress = [], CompressedContext.compress

    def noted(model, tokenizer, text, **options):
        compressed.append(text)
        return compress(model, tokenizer, text, **options)

    monkeypatch.setattr(CompressedContext, "compress", noted)
    status, out, err = run("ask", document, "-q", "What is it?", "-q", "Where is it?", "--max-new-tokens", 3)
    assert status == 0, err
    for part in ("document.txt", "prefill", "compression", "decoding, per token", "Full cache", "% kept"):
        assert part in out
    assert out.count("Question: ") == 2
    assert compressed == [cli.WARM_UP, document.read_text().strip()]


def test_json(report):
    report = report("--ratio", 0.5)
    assert set(report) == {
        "version", "model", "document", "ratio", "quantization", "dtype", "device", "tokens", "full", "compressed",
        "answers",
    }  # fmt: skip
    assert report["tokens"] == BEFORE + len(TEXT.strip())
    for name in ("full", "compressed"):
        assert set(report[name]) == {
            "bytes", "kept_fraction", "prefill_seconds", "compress_seconds", "decode_seconds_per_token",
        }  # fmt: skip
    assert report["full"]["kept_fraction"] == 1 and report["full"]["compress_seconds"] == 0
    assert 0.4 < report["compressed"]["kept_fraction"] < 0.6
    assert report["compressed"]["bytes"] < report["full"]["bytes"]
    (answer,) = report["answers"]
    assert answer["question"] == "What is it?"
    for name in ("full", "compressed"):
        assert set(answer[name]) == {"text", "tokens", "prefill_seconds", "seconds_per_token"}
        assert 1 <= answer[name]["tokens"] <= 4


def test_nothing_removed_answers_as_the_full_cache(report):
    (answer,) = report("--ratio", 1)["answers"]
    assert answer["full"]["text"] == answer["compressed"]["text"]


@pytest.mark.parametrize(
    "options",
    [
        ["--level", "pair-layer"],
        ["--level", "pair-uniform", "--replay", "full"],
        ["--scorer", "kvzip-plus", "--replay", "local", "--chunk-size", "32"],
        ["--dtype", "bfloat16"],
        ["--scorer", "mine"],
    ],
    ids=" ".join,
)
def test_options_reach_the_press(report, monkeypatch, options):
    """The command line knows no names of its own: what a registry holds, it takes."""
    monkeypatch.setitem(scoring.SCORERS, "mine", scoring.SCORERS["l2"])
    assert report(*options)["compressed"]["kept_fraction"] < 0.6


def test_quantised_bytes_are_reported(report):
    plain, *quantized = (report(*options) for options in ([], ["--quantization=int8"], ["--quantization=int4"]))
    assert [one["quantization"] for one in (plain, *quantized)] == [None, "int8", "int4"]
    int8, int4 = (one["compressed"]["bytes"] for one in quantized)
    assert int4 < int8 < 0.6 * plain["compressed"]["bytes"]
    assert len({one["compressed"]["kept_fraction"] for one in (plain, *quantized)}) == 1


def test_head_scores_are_made_and_used(run, report, document, tmp_path):
    scores = tmp_path / "scores.safetensors"
    status, out, err = run("heads", "score", document, "-o", scores)
    assert status == 0 and out == "" and scores.is_file(), err
    report("--level", "head", "--head-scores", scores)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        *((f"--ratio={ratio}", ("--ratio", "(0, 1]", ratio)) for ratio in ("0", "-0.1", "1.5", "nan", "inf")),
        *((f"{name}=0", (name, "at least 1, got 0")) for name in ("--max-new-tokens", "--chunk-size", "--threads")),
        ("--chunk-size=few", ("must be a whole number, got 'few'",)),
        ("--ratio=most", ("must be a number, got 'most'",)),
        ("--question=' '", ("--question", "is empty")),
        ("--dtype=other", ("--dtype", "'other'", "choose from")),
        ("--level=other", ("level must be one of 'pair', 'pair-layer'", "got 'other'")),
        ("--scorer=other", ("scorer must be one of 'kvzip'", "got 'other'")),
        ("--replay=other", ("replay must be one of", "'local'", "got 'other'")),
        ("--quantization=int3", ("quantization must be one of 'int8', 'int4'", "got 'int3'")),
        ("--device=abacus", ("unknown device 'abacus'",)),
        ("--model=./no_such_folder", ("unknown model './no_such_folder'", "no such folder")),
        ("--level=head --head-scores=none.safetensors", ("no such file: none.safetensors", "heads score")),
        ("--level=head", ("--head-scores FILE",)),
    ],
)
def test_wrong_options_are_one_line(run, document, monkeypatch, options, parts):
    """Before any model is loaded, where it has nothing to do with the mistake."""
    if "device" not in options and "model" not in options:
        monkeypatch.setattr(cli, "_load", None)
    assert_one_line_error(run("ask", document, "-q", "What?", *shlex.split(options)), *parts)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ("no such file", "document.txt")),
        (b"caf\xe9", ("is not UTF-8 (byte 3)", "iconv")),
        *((content, ("is empty",)) for content in (b"", b" \n\t\n", "\ufeff".encode())),
    ],
)
def test_unreadable_documents(run, document, content, parts):
    document.unlink() if content is None else document.write_bytes(content)
    assert_one_line_error(run("ask", document, "-q", "What?"), *parts)


def test_document_too_long_is_refused_before_any_forward(run, document, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("a forward pass was run")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fail)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaModel.forward", fail)
    # Template, two line breaks, the question's five characters and the 48 tokens of the answer beside the text
    document.write_text("a" * (WINDOW - BEFORE - AFTER - 2 - 5 - 48 + 7), encoding="utf-8")
    assert_one_line_error(run("ask", document, "-q", "What?"), "too long by 7 tokens", f"holds {WINDOW}", "shorten")


def test_longest_document_that_fits(report, document):
    document.write_text("a" * (WINDOW - BEFORE - AFTER - 2 - len("What is it?") - 4), encoding="utf-8")
    report()


def test_arguments_that_do_not_fit_together(run, document, tmp_path):
    assert_one_line_error(run("ask", document), "-q/--question", "required")
    assert_one_line_error(run("ask", tmp_path, "-q", "What?"), "is a folder")
    assert_one_line_error(run("heads", "score", document, "-o", tmp_path), "is not a file")
    scores = tmp_path / "none" / "scores.safetensors"
    assert_one_line_error(run("heads", "score", document, "-o", scores), "does not exist")
    document.write_text("a" * (WINDOW + 9), encoding="utf-8")
    assert_one_line_error(run("heads", "score", document, "-o", tmp_path / scores.name), "too long by 9 tokens")


def test_version(run):
    status, out, _ = run("--version")
    assert status == 0 and out.startswith("kvzip-press 0.")


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom kvzip_press import cli\n"
        "try:\n    cli.main(['ask', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("module", ["kvzip_press.cli", "kvzip_press.eval.command.main"])
def test_a_reader_that_has_seen_enough_is_no_error(module):
    """The pipe is closed before anything is written to it."""
    command = "--version" if module == "kvzip_press.cli" else "presses"
    code = f"import sys; from {module} import main; sys.exit(main([{command!r}]))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
