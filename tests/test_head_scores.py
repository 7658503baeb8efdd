"""Context-independent head scores: computed once, exchanged as files, applied without a replay."""

import json
import os
import stat

import pytest
import torch
from harness import ask, counted_calls, kept_positions, make_press, prefill, refused, scores_of
from safetensors.torch import save_file
from tiny_models import build_model, build_tokenizer, random_ids

from kvzip_press import HeadScores, KVzipPress
from kvzip_press.models import language_model
from kvzip_press.version import __version__

IDS, QUESTION = random_ids(60), random_ids(5, seed=3)
TEXT = "The harbour was rebuilt in 1907. The tower burned down in 1911. "
SCORES = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])


class Unpicklable:
    """Runs code when unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("unpickled",))


def test_compression_by_heads_replays_nothing(family):
    """The decoder runs once, for the prefill; the same context by pairs takes two replay passes more."""
    model = build_model(family)
    layers = 2 if "gemma3" in family else 4
    press = make_press(ratio=0.5, level="head", head_scores=HeadScores(SCORES[:layers]))
    with counted_calls(language_model(model).norm) as forwards:
        prefill(model, IDS, press)
        assert len(forwards) == 1
        prefill(model, IDS, make_press(ratio=0.5))
    assert len(forwards) == 1 + 3


@pytest.mark.parametrize(
    ("ratio", "scores", "expected"),
    [
        (0.1, SCORES, [[4, 60], [4, 4], [4, 4], [4, 4]]),
        (0.3, SCORES, [[4, 60], [60, 4], [4, 4], [4, 4]]),
        (0.5, SCORES, [[4, 60], [60, 4], [4, 60], [60, 4]]),
        (1.0, SCORES, [[60, 60]] * 4),
        # Ties go to the lower layer, then to the lower head
        (0.4, torch.ones(4, 2), [[60, 60], [60, 4], [4, 4], [4, 4]]),
    ],
)
def test_the_best_heads_stay_whole_and_the_others_keep_prefix_and_sinks(model, ratio, scores, expected):
    cache = prefill(model, IDS, make_press(ratio=ratio, level="head", head_scores=HeadScores(scores)))
    assert [layer.head_lengths[0].tolist() for layer in cache.layers] == expected
    assert all({*range(4)} <= head for heads in kept_positions(prefill(model, IDS), cache) for head in heads)


def test_scores_of_another_shape_are_refused_before_any_forward(model):
    press = make_press(level="head", head_scores=HeadScores(torch.ones(4, 3)))
    with refused(model, r"shape \(4, 3\), but LlamaForCausalLM needs \(4, 2\).*from_text"):
        prefill(model, IDS, press)


def test_the_head_level_needs_scores(model):
    with pytest.raises(ValueError, match="level='head' needs head_scores"):
        KVzipPress(level="head")
    press = make_press()
    press.level = "head"
    with pytest.raises(ValueError, match="level='head' needs head_scores"), press(model):
        pass
    with pytest.raises(ValueError, match="head_scores are for level='head', got level='pair'"):
        KVzipPress(head_scores=HeadScores(SCORES))


@pytest.mark.parametrize(
    "scores", [torch.ones(4), torch.ones(1, 4, 2), torch.ones(4, 2).long(), torch.tensor([[1.0, torch.nan]])]
)
def test_what_is_no_table_of_scores_is_refused(scores):
    with pytest.raises(ValueError, match="head scores must be"):
        HeadScores(scores)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_heads_score_is_its_highest_pair_score(family):
    """from_text replays the sample in the chat template and takes each head's maximum over all positions."""
    model, tokenizer = build_model(family), build_tokenizer()
    computed = HeadScores.from_text(model, tokenizer, TEXT, chunk_size=32)
    ids = torch.tensor([tokenizer.encode("<s>user:" + TEXT, add_special_tokens=False)])
    torch.testing.assert_close(computed.scores, scores_of(model, ids).amax(dim=-1))
    prefill(model, IDS, make_press(level="head", head_scores=computed))


def test_several_samples_give_the_maximum_of_each(model):
    tokenizer, texts = build_tokenizer(), [TEXT, "def f(x): return x + 1 # " * 3]
    alone = [HeadScores.from_text(model, tokenizer, text, chunk_size=32).scores for text in texts]
    both = HeadScores.from_text(model, tokenizer, texts, chunk_size=32)
    assert torch.equal(both.scores, torch.maximum(*alone))
    assert not torch.equal(both.scores, alone[0]) and not torch.equal(both.scores, alone[1])
    lengths = [len(tokenizer.encode("<s>user:" + text, add_special_tokens=False)) for text in texts]
    parameters = {"model": "", "scorer": "kvzip", "replay": "local", "chunk_size": "32", "kvzip_press": __version__}
    assert both.provenance == {**parameters, "sample_tokens": json.dumps(lengths)}


@pytest.mark.parametrize("texts", [[], "", " \n", [TEXT, ""]])
def test_an_empty_sample_is_refused(model, texts):
    with pytest.raises(ValueError, match="at least one text, and none may be empty"):
        HeadScores.from_text(model, build_tokenizer(), texts)


def test_saved_and_loaded_scores_are_equal_with_their_provenance(model, tmp_path, monkeypatch):
    """A file, with the permissions of any new one, gives back every bit and where the scores come from."""
    path = tmp_path / "heads.safetensors"
    scores = HeadScores(torch.rand(4, 2), {"model": "tiny", "sample_tokens": "[64]"})
    before = os.umask(0o022)
    with monkeypatch.context() as patched:
        # Other threads make files too: the mask of the process is not touched, not for an instant
        patched.setattr(os, "umask", lambda mask: pytest.fail("the umask was set"))
        scores.save(path)
    os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    loaded = HeadScores.load(path)
    assert torch.equal(loaded.scores, scores.scores) and loaded.provenance == scores.provenance
    assert os.listdir(tmp_path) == ["heads.safetensors"]
    caches = [prefill(model, IDS, make_press(level="head", head_scores=item)) for item in (scores, loaded)]
    assert torch.equal(ask(model, caches[0], QUESTION), ask(model, caches[1], QUESTION))


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    """Writing goes through a temporary file: a failure neither damages what was there nor leaves rubbish."""
    path = tmp_path / "heads.safetensors"
    HeadScores(SCORES).save(path)
    before = path.read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        HeadScores(torch.ones(4, 2)).save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["heads.safetensors"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none/heads.safetensors", "none' does not exist; create it first"),
        ("", "is not a file; name a file such as heads.safetensors"),
        ("heads.pt", "a file of the original code; use the ending .safetensors"),
    ],
)
def test_what_can_not_be_saved_or_read_again_is_refused(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        HeadScores(SCORES).save(tmp_path / name)


@pytest.mark.parametrize("shape", [(4, 2), (1, 4, 2), (4, 1, 2), (1, 4, 1, 2)])
def test_files_of_the_original_code_are_read(tmp_path, shape):
    """A .pt tensor of the original code, with dimensions of one or without, in any precision, or a list of layers."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.save(SCORES.view(shape).to(dtype), tmp_path / "scores.pt")
        loaded = HeadScores.load(tmp_path / "scores.pt")
        assert torch.equal(loaded.scores, SCORES.to(dtype).float())
        assert loaded.provenance == {"source": "scores.pt"}
    torch.save(list(SCORES), tmp_path / "scores.pt")
    assert torch.equal(HeadScores.load(tmp_path / "scores.pt").scores, SCORES)


def test_nothing_of_a_pt_file_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"scores": Unpicklable()}, "scores.pt")
    with pytest.raises(ValueError, match="scores.pt' is not a tensor file"):
        HeadScores.load("scores.pt")
    assert os.listdir() == ["scores.pt"]


def truncate(path):
    HeadScores(SCORES).save(path)
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("a.safetensors", lambda path: path.write_bytes(b""), "a.safetensors' is not a safetensors file of head"),
        ("b.safetensors", lambda path: path.write_bytes(b"\x10" * 200), "b.safetensors' is not a safetensors file"),
        ("c.safetensors", truncate, "c.safetensors' is not a safetensors file of head scores"),
        ("d.safetensors", lambda path: save_file({"scores": SCORES}, path), "d.safetensors' holds no head scores"),
        ("e.pt", lambda path: path.write_bytes(b"not a tensor"), "e.pt' is not a tensor file"),
        ("f.pt", lambda path: torch.save({"scores": SCORES}, path), "f.pt' holds a dict"),
        ("g.pt", lambda path: torch.save(torch.ones(2, 3, 4), path), r"must be floats of shape .* got \(2, 3, 4\)"),
        ("none.pt", lambda path: None, "no head scores at .*none.pt"),
    ],
)
def test_files_that_hold_no_head_scores_are_told_apart(tmp_path, name, write, message):
    write(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        HeadScores.load(tmp_path / name)
