import pytest

from kvzip_press.eval.tasks.base import GENERATED, HUB, Request, Task
from kvzip_press.eval.tasks.registry import TASKS, families, get_tasks

RULER = (
    "niah_single_1 niah_single_2 niah_single_3 niah_multikey_1 niah_multikey_2 niah_multikey_3 niah_multivalue "
    "niah_multiquery vt cwe fwe qa_1 qa_2"
).split()
SCBENCH = "kv prefix_suffix vt mf many_shot summary qa_eng choice_eng repoqa repoqa_and_kv summary_with_needles".split()


def test_a_family_stands_for_its_tasks():
    assert [task.name for task in get_tasks(["ruler"])] == [f"ruler_{name}" for name in RULER]
    assert [task.name for task in get_tasks(["scbench"])] == [f"scbench_{name}" for name in SCBENCH]
    tiny = [f"scbench_{name}_tiny" for name in SCBENCH if name not in ("qa_eng", "choice_eng")]
    assert [task.name for task in get_tasks(["scbench_tiny"])] == tiny
    assert [task.name for task in get_tasks(["privacy"])] == ["privacy_refusal", "privacy_leak"]
    assert set(families()) == {
        *("ruler", "niah", "squad", "gsm8k", "privacy", "facts", "fidelity"),
        *(f"scbench{size}" for size in ("", "_tiny", "_short", "_mid")),
    }


def test_tasks_come_once_and_in_the_order_asked_for():
    names = [task.name for task in get_tasks(["squad", "privacy", "squad", "privacy_leak", "niah"])]
    assert names == ["squad", "privacy_refusal", "privacy_leak", "niah"]


def test_names_are_found_in_any_case():
    assert [task.name for task in get_tasks(["SQuAD", "Privacy_LEAK"])] == ["squad", "privacy_leak"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        *[("rular", "ruler"), ("ruler_cve", "ruler_cwe"), ("scbench_kv_tinny", "scbench_kv_tiny")],
        # Families of the name of their only task are listed once.
        *[("nih", "niah"), ("NIHA", "niah"), ("Squat", "squad")],
    ],
)
def test_unknown_names_list_near_ones(name, near):
    with pytest.raises(ValueError, match=f"unknown task '{name}': did you mean ") as error:
        get_tasks(["niah", name])
    assert str(error.value).split("did you mean ")[1].rstrip("?").split(", ").count(near) == 1


def test_a_name_like_no_other_lists_the_families():
    with pytest.raises(ValueError, match="did you mean ruler, niah, scbench"):
        get_tasks(["hellaswag"])


def test_every_task_says_what_it_is():
    for name, task in TASKS.items():
        assert isinstance(task, Task)
        assert task.name == name and task.family and task.version >= 1 and task.__doc__
        assert task.sources and set(task.sources) <= {GENERATED, HUB}
        assert task.instruction.endswith(".")
    assert TASKS["gsm8k"].instruction == "Given the context, answer to the following reasoning question."
    assert TASKS["squad"].instruction == (
        "Given the context, answer to the following question or request without explanation."
    )
    assert [name for name, task in TASKS.items() if task.imitation] == [
        f"scbench_prefix_suffix{size}" for size in ("", "_tiny", "_short", "_mid")
    ]


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if GENERATED not in task.sources])
def test_what_cannot_be_generated_says_so(name):
    with pytest.raises(ValueError, match=f"^{name}: can't be generated: give --source hub, or a local folder"):
        TASKS[name].load(Request())


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if HUB not in task.sources])
def test_what_is_not_published_says_so(name):
    with pytest.raises(ValueError, match=f"^{name}: can only be generated"):
        TASKS[name].load(Request(source="hub"))
