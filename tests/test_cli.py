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


def assert_one_line_error(outcome, *parts):
    status, out, err = outcome
    assert status == 2
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("kvzip-press: error: ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    for part in parts:
        assert part in lines[0]


def test_table(run, document):
    status, out, _ = run("ask", document, "-q", "What is it?", "-q", "Where is it?", "--max-new-tokens", 3)
    assert status == 0
    for part in ("document.txt", "prefill", "compression", "decoding, per token", "Full cache", "% kept"):
        assert part in out
    assert out.count("Question: ") == 2


def test_json(run, document):
    status, out, _ = run("ask", document, "-q", "What is it?", "--ratio", 0.5, "--max-new-tokens", 4, "--json")
    assert status == 0
    report = json.loads(out)
    assert set(report) == {
        "version", "model", "document", "ratio", "quantization", "dtype", "device", "tokens", "full", "compressed",
        "answers",
    }  # fmt: skip
    assert report["tokens"] == BEFORE + len(TEXT.strip())
    for name in ("full", "compressed"):
        assert set(report[name]) == {
            "bytes", "kept_fraction", "prefill_seconds", "compress_seconds", "decode_seconds_per_token",
        }  # fmt: skip
    assert report["full"]["kept_fraction"] == 1
    assert report["full"]["compress_seconds"] == 0
    assert 0.4 < report["compressed"]["kept_fraction"] < 0.6
    assert report["compressed"]["bytes"] < report["full"]["bytes"]
    (answer,) = report["answers"]
    assert answer["question"] == "What is it?"
    for name in ("full", "compressed"):
        assert set(answer[name]) == {"text", "tokens", "prefill_seconds", "seconds_per_token"}
        assert 1 <= answer[name]["tokens"] <= 4


def test_nothing_removed_answers_as_the_full_cache(run, document):
    _, out, _ = run("ask", document, "-q", "What is it?", "--ratio", 1, "--max-new-tokens", 8, "--json")
    (answer,) = json.loads(out)["answers"]
    assert answer["full"]["text"] == answer["compressed"]["text"]


@pytest.mark.parametrize(
    "options",
    [
        ["--level", "pair-layer"],
        ["--level", "pair-uniform", "--replay", "full"],
        ["--scorer", "kvzip-plus", "--replay", "local", "--chunk-size", "32"],
        ["--dtype", "bfloat16"],
    ],
    ids=" ".join,
)
def test_options_reach_the_press(run, document, options):
    status, out, err = run("ask", document, "-q", "What is it?", "--max-new-tokens", 2, "--json", *options)
    assert status == 0, err
    assert json.loads(out)["compressed"]["kept_fraction"] < 0.6


def test_a_new_scorer_needs_one_registry_line(run, document, monkeypatch):
    """The command line knows no names of its own."""
    monkeypatch.setitem(scoring.SCORERS, "mine", scoring.SCORERS["l2"])
    status, _, err = run("ask", document, "-q", "What is it?", "--max-new-tokens", 2, "--scorer", "mine")
    assert status == 0, err


def test_quantised_bytes_are_reported(run, document):
    compressed = {}
    for quantization in (None, "int8", "int4"):
        options = [] if quantization is None else ["--quantization", quantization]
        status, out, err = run("ask", document, "-q", "What is it?", "--max-new-tokens", 2, "--json", *options)
        assert status == 0, err
        report = json.loads(out)
        assert report["quantization"] == quantization
        compressed[quantization] = report["compressed"]["bytes"]
    assert compressed["int4"] < compressed["int8"] < 0.6 * compressed[None]


def test_head_scores_are_made_and_used(run, document, tmp_path):
    scores = tmp_path / "scores.safetensors"
    status, out, err = run("heads", "score", document, "-o", scores)
    assert status == 0, err
    assert out == ""
    assert scores.is_file()
    status, _, err = run("ask", document, "-q", "What is it?", "--level", "head", "--head-scores", scores)
    assert status == 0, err


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


def test_no_question(run, document):
    assert_one_line_error(run("ask", document), "-q/--question", "required")


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


def test_longest_document_that_fits(run, document):
    document.write_text("a" * (WINDOW - BEFORE - AFTER - 2 - 5 - 4), encoding="utf-8")
    status, _, err = run("ask", document, "-q", "What?", "--max-new-tokens", 4)
    assert status == 0, err


@pytest.mark.parametrize(("name", "message"), [("", "is not a file"), ("none/scores.safetensors", "does not exist")])
def test_scores_into_a_place_that_is_none(run, document, tmp_path, name, message):
    assert_one_line_error(run("heads", "score", document, "-o", tmp_path / name), message)


def test_document_is_a_folder(run, tmp_path):
    assert_one_line_error(run("ask", tmp_path, "-q", "What?"), "is a folder")


def test_text_to_score_too_long(run, document, tmp_path):
    document.write_text("a" * (WINDOW + 9), encoding="utf-8")
    outcome = run("heads", "score", document, "-o", tmp_path / "scores.safetensors")
    assert_one_line_error(outcome, "too long by 9 tokens")


def test_version(run):
    status, out, _ = run("--version")
    assert status == 0
    assert out.startswith("kvzip-press 0.")


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom kvzip_press import cli\n"
        "try:\n    cli.main(['ask', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_kernels_are_warmed_up_before_anything_is_timed(run, document, monkeypatch):
    """What is compiled at first use would be in the compressed cache's times."""
    compressed = []
    compress = CompressedContext.compress

    def noted(model, tokenizer, text, **options):
        compressed.append(text)
        return compress(model, tokenizer, text, **options)

    monkeypatch.setattr(CompressedContext, "compress", noted)
    assert run("ask", document, "-q", "What?", "--max-new-tokens", "1")[0] == 0
    assert compressed == [cli.WARM_UP, document.read_text().strip()]


@pytest.mark.parametrize("module", ["kvzip_press.cli", "kvzip_press.eval.command.main"])
def test_a_reader_that_has_seen_enough_is_no_error(module):
    """The pipe is closed before anything is written to it."""
    command = "--version" if module == "kvzip_press.cli" else "presses"
    code = f"import sys; from {module} import main; sys.exit(main([{command!r}]))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
