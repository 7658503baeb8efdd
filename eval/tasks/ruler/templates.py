"""RULER's wording, and how a prompt is cut into context, question and beginning of the answer.

Wording after https://github.com/NVIDIA/RULER, cut as in the published data set simonjegou/ruler of kvpress.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from ..base import Question

NEEDLE = "One of the special magic {type} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DOCUMENT = "Document {number}:\n{document}"


@dataclass(frozen=True)
class Template:
    """Wording of a kind of task."""

    text: str  # the prompt, with a field `context` and others
    answer_prefix: str  # the beginning of the answer
    # its last match in the prompt is where the question begins; an example with a question stays in the context
    question_pattern: str
    answer_pattern: str  # its first match in the question is where the beginning of the answer begins
    max_new_tokens: int  # longest answer
    metric: str = "ruler_all"  # a name in `kvzip_press.eval.metrics.registry.METRICS`

    def fill(self, **fields: Any) -> str:
        """Return the whole prompt, from the task to the beginning of the answer."""
        return (self.text + self.answer_prefix).format(**fields)

    def singular(self) -> Template:
        """Return the wording for one value of one key."""
        text, answer_prefix = self.text, self.answer_prefix
        for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
            text, answer_prefix = text.replace(plural, singular), answer_prefix.replace(plural, singular)
        return replace(self, text=text, answer_prefix=answer_prefix)

    def split(self, prompt: str, answers: list[str]) -> tuple[str, tuple[Question, ...]]:
        """Cut a prompt into the context and its one question."""
        begin = [match.start() for match in re.finditer(self.question_pattern, prompt)][-1]
        context, rest = prompt[:begin], prompt[begin:]
        match = re.search(self.answer_pattern, rest)
        if match is None:
            raise ValueError(f"no {self.answer_pattern!r} in {rest!r}")
        text, answer_prefix = rest[: match.start()], rest[match.start() :]
        return context, (Question(text, tuple(answers), self.metric, self.max_new_tokens, answer_prefix),)


NIAH = Template(
    "Some special magic {type} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type} afterwards.\n{context}\n"
    "What are all the special magic {type} for {query} mentioned in the provided text?",
    " The special magic {type} for {query} mentioned in the provided text are",
    r"What (?:is|are all) the special magic",
    r"The special magic",
    max_new_tokens=128,
)
VT = Template(
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{number} variables are assigned the value {query}, they are: ",
    r"Question: Find all variables that are assigned the value",
    r"Answer:",
    max_new_tokens=30,
)
CWE = Template(
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
    r"Question: What are the 10 most common words in the above list\?",
    r"Answer:",
    max_new_tokens=120,
)
FWE = Template(
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
    r"Question: Do not provide any explanation\.",
    r"Answer:",
    max_new_tokens=50,
)
QA_TASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
QA = Template(
    f"{QA_TASK}\n\nThe following are given documents.\n\n{{context}}\n\n{QA_TASK}\n\nQuestion: {{query}}",
    " Answer:",
    r"Answer the question based on the given documents\.",
    # Not one that a question could hold.
    r"Answer:$",
    max_new_tokens=32,
    metric="ruler_any",
)
