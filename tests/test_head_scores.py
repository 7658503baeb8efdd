"""Context-independent head scores: computed once, exchanged as files, applied without a replay."""

from __future__ import annotations

import json
import os
import stat

import pytest
import torch
from dense_reference import dense_masked, keep_masks
from harness import TOLERANCE, ask, counted_calls, follow, make_press, prefill, refused, scores_of
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
    with counted_calls(language_model(model).norm) as forwards:
        prefill(model, IDS, make_press(ratio=0.5))
    assert len(forwards) == 3


def test_the_best_heads_stay_whole_and_the_others_keep_prefix_and_sinks(model):
    """Half of eight heads: the four best hold the context, the others four sinks; logits are the reference's."""
    cache = prefill(model, IDS, make_press(ratio=0.5, level="head", head_scores=HeadScores(SCORES)))
    lengths = [layer.head_lengths[0].tolist() for layer in cache.layers]
    assert lengths == [[4, 60], [60, 4], [4, 60], [60, 4]]
    full = prefill(model, IDS)
    keep = keep_masks(full, cache)
    assert all(mask[..., :4].all() for mask in keep.values())
    ours = follow(model, cache, QUESTION, 3)
    with dense_masked(model, keep):
        torch.testing.assert_close(ours, follow(model, full, QUESTION, 3), **TOLERANCE)


def test_equal_heads_are_kept_from_the_first_layer_on(model):
    """Ties go to the lower layer, then to the lower head."""
    press = make_press(ratio=0.4, level="head", head_scores=HeadScores(torch.ones(4, 2)))
    lengths = [layer.head_lengths[0].tolist() for layer in prefill(model, IDS, press).layers]
    assert lengths == [[60, 60], [60, 4], [4, 4], [4, 4]]


def test_scores_of_another_shape_are_refused_before_any_forward(model):
    """Scores of another model: an error with both shapes and the way to compute one's own."""
    press = make_press(level="head", head_scores=HeadScores(torch.ones(4, 3)))
    with refused(model, r"shape \(4, 3\), but LlamaForCausalLM needs \(4, 2\).*from_text"):
        prefill(model, IDS, press)


def test_the_head_level_needs_scores(model):
    """Without head_scores the level is refused in the constructor, and when it is set later, on entering."""
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
    """Another number of dimensions, integers and NaN are an error."""
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
    """The scores of two texts are the elementwise maximum of each text's own."""
    tokenizer, texts = build_tokenizer(), [TEXT, "def f(x): return x + 1 # " * 3]
    alone = [HeadScores.from_text(model, tokenizer, text, chunk_size=32).scores for text in texts]
    both = HeadScores.from_text(model, tokenizer, texts, chunk_size=32)
    assert torch.equal(both.scores, torch.maximum(*alone))
    assert not torch.equal(both.scores, alone[0]) and not torch.equal(both.scores, alone[1])
    lengths = [len(tokenizer.encode("<s>user:" + text, add_special_tokens=False)) for text in texts]
    assert json.loads(both.provenance["sample_tokens"]) == lengths
    assert both.provenance | {"sample_tokens": ""} == {
        "model": "",
        "scorer": "kvzip",
        "replay": "local",
        "chunk_size": "32",
        "sample_tokens": "",
        "kvzip_press": __version__,
    }


@pytest.mark.parametrize("texts", [[], "", " \n", [TEXT, ""]])
def test_an_empty_sample_is_refused(model, texts):
    """No text, or one without a word among them, is an error."""
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
    """A folder that does not exist, a folder itself, and an ending that means another format."""
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
    """A file that would run code when unpickled is refused, and its code does not run."""
    monkeypatch.chdir(tmp_path)
    torch.save({"scores": Unpicklable()}, "scores.pt")
    with pytest.raises(ValueError, match="scores.pt' is not a tensor file"):
        HeadScores.load("scores.pt")
    assert os.listdir() == ["scores.pt"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.safetensors", b"", "is not a safetensors file of head scores"),
        ("b.safetensors", b"\x10" * 200, "is not a safetensors file of head scores"),
        ("c.safetensors", None, "is not a safetensors file of head scores"),
        ("d.pt", b"not a tensor", "is not a tensor file"),
    ],
)
def test_corrupted_files_are_refused_by_name(tmp_path, name, content, message):
    """A truncated (None: all but the end of a saved one) or foreign file is a ValueError that names it."""
    HeadScores(SCORES).save(tmp_path / "whole.safetensors")
    (tmp_path / name).write_bytes((tmp_path / "whole.safetensors").read_bytes()[:-8] if content is None else content)
    with pytest.raises(ValueError, match=f"{name}' {message}"):
        HeadScores.load(tmp_path / name)


def test_other_tensor_files_are_refused(tmp_path):
    """Safetensors without our format, .pt files of something else, and missing files are told apart."""
    save_file({"scores": SCORES}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="other.safetensors' holds no head scores"):
        HeadScores.load(tmp_path / "other.safetensors")
    torch.save({"scores": SCORES}, tmp_path / "dict.pt")
    with pytest.raises(ValueError, match="dict.pt' holds a dict"):
        HeadScores.load(tmp_path / "dict.pt")
    torch.save(torch.ones(2, 3, 4), tmp_path / "cube.pt")
    with pytest.raises(ValueError, match=r"head scores must be floats of shape .* got \(2, 3, 4\)"):
        HeadScores.load(tmp_path / "cube.pt")
    with pytest.raises(ValueError, match="no head scores at .*none.pt"):
        HeadScores.load(tmp_path / "none.pt")
