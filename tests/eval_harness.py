"""What tests of the evaluation share: a tiny model in a folder, and a task of their own."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from kvzip_press.eval.run.engine_local import LocalEngine
from kvzip_press.eval.run.grid import Grid
from kvzip_press.eval.run.identity import RunIdentity
from kvzip_press.eval.run.session import Outcome, Session
from kvzip_press.eval.tasks.base import Question, Request, Sample, Task

TEMPLATE = (
    "<s>{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = "river stone bright under walking seldom paper engine cloud answer winter matter open green".split()


def save_tiny_model(folder: Path, window: int = 1024) -> Path:
    """
    A random model of 3 layers with 4 query and 2 KV heads, and a tokenizer of bytes and a few words.

    Its query bias lets kvpress find keys that no query attends to, as it does in real models.
    """
    alphabet = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens([f" {word}" for word in WORDS])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)

    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=window, rope_theta=1e8)
    model = Qwen2ForCausalLM(Qwen2Config(**shape, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.bias" in name:
                parameter.fill_(2.0)
            elif "q_proj" in name or "k_proj" in name:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return folder


def words(number: int, seed: int) -> str:
    """A text of that many words."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (number,), generator=generator))


class ToyTask(Task):
    """Contexts of words, with two questions each."""

    name = "toy"
    family = "toys"

    def __init__(self, name: str = "toy", *, context_words: int = 60, metric: str = "include") -> None:
        self.name = name
        self.context_words = context_words
        self.metric = metric

    def load(self, request: Request) -> list[Sample]:
        """Three samples."""
        return [self._sample(index, request.seed) for index in range(3)][: request.limit]

    def _sample(self, index: int, seed: int) -> Sample:
        questions = tuple(
            Question(f"Which word is {n}?", (WORDS[n],), self.metric, max_new_tokens=4, answer_prefix="It is")
            for n in (index, index + 5)
        )
        return Sample(f"{index}", words(self.context_words, 100 * seed + index), questions)


class EvaluationRun:
    """Runs grids of toy tasks into a folder, as `kvzip-eval run` does."""

    def __init__(self, loaded: tuple[Any, Any], folder: Path, *, head_scores: Any = None, **used: Any) -> None:
        self.loaded = loaded
        self.folder = folder
        self.head_scores = head_scores
        self.used = {"backend": "auto", "budget": "equal", "scorer": "paper", **used}

    def __call__(self, *tasks: Task, named: bool = True, **grid: Any) -> Outcome:
        """Measure tasks; if they are not named themselves, those that can't be had are left out."""
        model, tokenizer = self.loaded
        run = RunIdentity.of(model, "toy-model", **self.used)
        self.engine = LocalEngine(model, tokenizer, run, self.head_scores)
        session = Session(self.engine, self.folder, progress=False)
        self.log = session.log
        wanted = [(task, named) for task in tasks or (ToyTask(),)]
        return session.measure(Grid(wanted, **{"presses": ("full", "kvzip"), "ratios": (0.3, 0.6), **grid}))
