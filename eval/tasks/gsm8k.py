"""GSM8K: the last sentence of a problem asked about the others."""

from __future__ import annotations

from .base import HUB, Question, Request, Sample, Task
from .generation import token_counter
from .loading import Published, read_rows, wants_generated

PUBLISHED = Published("openai/gsm8k", "test", ("question", "answer"), ("main/test*", "test*", "*"), name="main")
NUM_CONTEXTS = 100
MIN_CONTEXT_TOKENS = 72
QUERY = (
    "Reason and answer the question. "
    "You must say the answer in the last sentence beginning with 'The answer is'. Q: {question}"
)


class Gsm8k(Task):
    """The first 100 problems whose context has at least 72 tokens."""

    name = "gsm8k"
    family = "gsm8k"
    version = 2
    sources = (HUB,)
    instruction = "Given the context, answer to the following reasoning question."

    def load(self, request: Request) -> list[Sample]:
        """Return the first problems, named by their places in the data; ValueError if no context is long enough."""
        wants_generated(self, request)
        count_tokens = token_counter(self, request)
        samples: list[Sample] = []
        rows = read_rows(self.name, request.source, PUBLISHED)
        for row in rows:
            if len(samples) == request.number(NUM_CONTEXTS):
                break
            *sentences, asked = row.text("question").split(". ")
            context = ". ".join(sentences).strip() + "."
            if count_tokens(context) >= MIN_CONTEXT_TOKENS:
                gold = row.text("answer").split("####")[-1].strip()
                question = Question(QUERY.format(question=asked.strip()), (gold,), "gsm", 512)
                samples.append(Sample(str(row.index), context, (question,)))
        if not samples and request.limit != 0:
            raise ValueError(
                f"{self.name}: of {len(rows)} rows none has {MIN_CONTEXT_TOKENS} tokens or more before the question, "
                "which is what follows the last '. ': give longer problems"
            )
        return samples


TASKS: list[Task] = [Gsm8k()]
