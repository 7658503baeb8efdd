"""All tasks by name. A family's name stands for all its tasks."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module

from .base import Task

# Modules of this folder, each with a list TASKS
FAMILIES = [
    "ruler.tasks",
    "niah",
    "scbench.tasks",
    "squad",
    "gsm8k",
    "privacy",
    "facts",
    "fidelity",
]
TASKS: dict[str, Task] = {
    task.name: task for family in FAMILIES for task in import_module(f".{family}", __package__).TASKS
}


def families() -> dict[str, list[Task]]:
    """Return the tasks of each family."""
    grouped: dict[str, list[Task]] = {}
    for task in TASKS.values():
        grouped.setdefault(task.family, []).append(task)
    return grouped


def get_tasks(names: Iterable[str]) -> list[Task]:
    """
    Return the tasks of names, in any case, of tasks and families; each once, in the order of the names.

    Raises
    ------
    ValueError
        If there is no such task or family; near names are given.
    """
    by_family = families()
    found: dict[str, Task] = {}
    for name in names:
        lower = name.lower()
        if lower in TASKS:
            found[lower] = TASKS[lower]
        elif lower in by_family:
            found |= {task.name: task for task in by_family[lower]}
        else:
            # Some families have the name of their only task.
            known = list(dict.fromkeys([*by_family, *TASKS]))
            near = get_close_matches(lower, known, n=5) or [task for task in known if lower in task] or list(by_family)
            raise ValueError(f"unknown task {name!r}: did you mean {', '.join(near)}?")
    return list(found.values())
