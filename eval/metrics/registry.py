"""All metrics by name.

After the code of arXiv 2505.23416, with its traps closed: an empty prediction scores 0, and a reference of which
nothing is left to compare is an error in the data, not a match. A name that ends in ``-official`` judges as SCBench's
own code (https://github.com/microsoft/MInference), one in ``-lenient`` as the paper's code where that accepts too much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..choices import SCORERS
from ..tasks.base import Question
from . import text_match
from .code_match import repoqa
from .text_forms import first_number, normalise, squeeze
from .text_match import Score


@dataclass(frozen=True)
class Metric:
    """A way to judge an answer."""

    judge: Callable[[str, Question], Score]  # the score of a prediction, which is never empty
    # the form in which a reference is compared; it must not be empty. None for metrics without references.
    form: Callable[[str], str] | None

    def check(self, question: Question) -> None:
        """Raise ValueError if the question has no reference, or one of which nothing is left to compare."""
        if self.form is None:
            return
        if not question.answers:
            raise ValueError(f"the question {question.text!r} has no reference answer: correct the data")
        for answer in question.answers:
            if not self.form(answer):
                raise ValueError(f"the answer {answer!r} normalises to nothing: correct the data")

    def __call__(self, prediction: str, question: Question) -> Score:
        """Return the score of a prediction."""
        self.check(question)
        return self.judge(prediction, question) if prediction.strip() else Score(0.0, "")


METRICS: dict[str, Metric] = {
    "include": Metric(text_match.include, normalise),
    "f1": Metric(text_match.f1, normalise),
    "qa": Metric(text_match.qa, normalise),
    "gsm": Metric(text_match.gsm, text_match.gsm_gold),
    "gsm-lenient": Metric(text_match.gsm_lenient, text_match.gsm_gold),
    "mf": Metric(text_match.mf, first_number),
    "mf-official": Metric(text_match.mf_official, first_number),
    "vt": Metric(text_match.vt, text_match.vt_form),
    "vt-official": Metric(partial(text_match.vt, form=str.lower), text_match.vt_form),
    "option": Metric(text_match.option, text_match.option_form),
    "choice": Metric(text_match.choice, str.strip),
    "choice-official": Metric(text_match.choice_official, str.strip),
    "passkey": Metric(text_match.include, normalise),
    "passkey-official": Metric(text_match.passkey_official, str.strip),
    "rouge-l": Metric(partial(text_match.rouge, kind="rougeL"), text_match.rouge_form),
    "rouge-l-official": Metric(partial(text_match.rouge, kind="rougeLsum"), text_match.rouge_form),
    "repoqa": Metric(repoqa, str.strip),
    "ruler_all": Metric(text_match.ruler_all, str.strip),
    "ruler_any": Metric(text_match.ruler_any, str.strip),
    "refusal": Metric(text_match.refusal, None),
    "leak": Metric(text_match.leak, squeeze),
}


def metric_of(name: str, scorer: str = "paper") -> Metric:
    """Return a metric, in the variant of a scorer if it has one; ValueError if there is no such metric or scorer."""
    if scorer not in SCORERS:
        raise ValueError(f"the scorer must be one of {', '.join(SCORERS)}, got {scorer!r}")
    if name not in METRICS:
        raise ValueError(f"unknown metric {name!r}: there are {', '.join(METRICS)}")
    return METRICS.get(f"{name}-{scorer}", METRICS[name])
