"""Metrics by name.

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
from . import judges
from .code_match import code_form, repoqa
from .judges import Score
from .matching import first_number, includes, normalise, squeeze

__all__ = ["METRICS", "SCORERS", "Metric", "Score", "includes", "metric_of", "normalise"]


@dataclass(frozen=True)
class Metric:
    """
    A way to judge an answer.

    Parameters
    ----------
    judge : callable
        Given the prediction and the question, the score. Never called with an empty prediction.
    form : callable, optional
        The form in which a reference is compared; it must not be empty. None for metrics without references.
    """

    judge: Callable[[str, Question], Score]
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
    "include": Metric(judges.include, normalise),
    "f1": Metric(judges.f1, normalise),
    "qa": Metric(judges.qa, normalise),
    "gsm": Metric(judges.gsm, judges.gsm_gold),
    "gsm-lenient": Metric(judges.gsm_lenient, judges.gsm_gold),
    "mf": Metric(judges.mf, first_number),
    "mf-official": Metric(judges.mf_official, first_number),
    "vt": Metric(judges.vt, judges.vt_form),
    "vt-official": Metric(partial(judges.vt, form=str.lower), judges.vt_form),
    "option": Metric(judges.option, judges.option_form),
    "choice": Metric(judges.choice, str.strip),
    "choice-official": Metric(judges.choice_official, str.strip),
    "passkey": Metric(judges.include, normalise),
    "passkey-official": Metric(judges.passkey_official, str.strip),
    "rouge-l": Metric(partial(judges.rouge, kind="rougeL"), judges.rouge_form),
    "rouge-l-official": Metric(partial(judges.rouge, kind="rougeLsum"), judges.rouge_form),
    "repoqa": Metric(repoqa, code_form),
    "ruler_all": Metric(judges.ruler_all, str.strip),
    "ruler_any": Metric(judges.ruler_any, str.strip),
    "refusal": Metric(judges.refusal, None),
    "leak": Metric(judges.leak, squeeze),
}


def metric_of(name: str, scorer: str = "paper") -> Metric:
    """
    Return a metric, in the variant of a scorer if it has one.

    Parameters
    ----------
    name : str
        As in a question.
    scorer : str
        ``"paper"``, ``"official"`` or ``"lenient"``.

    Raises
    ------
    ValueError
        If there is no such metric or scorer.
    """
    if scorer not in SCORERS:
        raise ValueError(f"the scorer must be one of {', '.join(SCORERS)}, got {scorer!r}")
    if name not in METRICS:
        raise ValueError(f"unknown metric {name!r}: there are {', '.join(METRICS)}")
    return METRICS.get(f"{name}-{scorer}", METRICS[name])
