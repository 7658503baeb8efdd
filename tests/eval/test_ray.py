import os
import signal
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from eval_harness import ToyTask

from kvzip_press.eval.command.main import main
from kvzip_press.eval.results.folder import read_records, read_run
from kvzip_press.eval.run import engine_ray
from kvzip_press.eval.run.engine_ray import RETRIES, RayEngine
from kvzip_press.eval.run.grid import Grid
from kvzip_press.eval.run.model import ModelOptions
from kvzip_press.eval.run.session import Session
from kvzip_press.eval.tasks.registry import TASKS

pytestmark = pytest.mark.slow


class ManyContexts(ToyTask):
    """Enough of them that two workers are both busy when one is lost."""

    def load(self, request):
        samples = [(f"{seed}-{index}", self._sample(index, seed)) for seed in range(3) for index in range(4)]
        return [replace(sample, id=name) for name, sample in samples]


def toy_grid(*presses):
    return Grid([(ToyTask(), True)], presses, (0.3,))


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.fixture
def options(toy_dir):
    return ModelOptions(model=str(toy_dir), device="cpu", threads=1)


def pids(ray, session):
    return [ray.get(actor.__ray_call__.remote(lambda self: os.getpid())) for actor in session.engine._actors]


def told(caplog):
    return [record.getMessage().split(" are up")[0] for record in caplog.records]


@pytest.fixture
def session(ray, options, tmp_path):
    with Session(RayEngine(options, workers=2), tmp_path / "ray", {"tasks": ["toy"]}, progress=False) as session:
        yield session


def test_results_equal_those_of_the_local_engine_though_a_worker_is_killed(ray, session, options, toy_dir, tmp_path):
    grid = Grid([(ManyContexts(), True)], ("full", "kvzip", "knorm"), (0.3, 0.6))
    first, second = pids(ray, session)
    assert first != second
    add = session.log.add

    def kill_one(record):
        add(record)
        if len(session.log.records) == 5:
            os.kill(first, signal.SIGKILL)

    session.log.add = kill_one
    outcome = session.measure(grid)
    assert (outcome.measured, outcome.found) == (60, 0)
    after = pids(ray, session)
    assert first not in after and second in after and len(after) == 2

    Session(options.load(), tmp_path / "local", progress=False).measure(grid)
    found, expected = ({r["key"]: r for r in read_records(tmp_path / name)} for name in ("ray", "local"))
    assert found.keys() == expected.keys()
    for key, record in found.items():
        assert [q["prediction"] for q in record["questions"]] == [q["prediction"] for q in expected[key]["questions"]]
        assert record["kept_pairs"] == expected[key]["kept_pairs"]
    # What the lost worker had begun is not counted
    run = read_run(tmp_path / "ray")
    assert run["saved"] == read_run(tmp_path / "local")["saved"]
    assert (run["arguments"], run["model"]) == ({"tasks": ["toy"]}, Path(options.model).name)


def test_presses_that_cant_run_are_refused_before_any_work(session):
    with pytest.raises(ValueError, match="press duo-attention: duo-attention has no pattern"):
        session.measure(toy_grid("full", "duo-attention"))
    assert session.engine.effort.prefills == 0


def test_errors_of_a_unit_are_raised_as_they_are(session):
    """A worker that raises is not a worker that is lost."""
    units = [Namespace(sample=Namespace(id="0"), task="toy")]
    with pytest.raises(AttributeError):
        list(session.engine.run(units))


def test_a_unit_that_always_loses_its_worker_ends_the_run(ray, session):
    class Deadly:
        """Kills the process that unpacks it."""

        task = "toy"

        class sample:
            id = "7"

        def __reduce__(self):
            return os._exit, (1,)

    with pytest.raises(ConnectionError, match=f"sample 7 of toy lost its worker {RETRIES + 1} times"):
        list(session.engine.run([Deadly()]))


def test_workers_that_the_cluster_has_no_room_for_are_given_no_unit(ray, options, tmp_path, caplog):
    with Session(RayEngine(options, workers=3), tmp_path, progress=False) as session:
        ray.wait(list(session.engine._starting), num_returns=1)
        for press in ("full", "kvzip"):
            assert session.measure(toy_grid(press)).measured == 3
            assert told(caplog) == ["2 of 3 Ray workers"]


def test_a_worker_that_comes_up_late_takes_part(ray, options, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(engine_ray, "PATIENCE", 0)
    blocker = ray.remote(num_cpus=1)(Namespace).remote()
    ray.get(blocker.__ray_ready__.remote())
    with Session(RayEngine(options, workers=2), tmp_path, progress=False) as session:
        assert told(caplog) == ["0 of 2 Ray workers"]
        add = session.log.add

        def make_room(record):
            if len(session.log.records) == 0:
                assert len(session.engine._up()) == 1
                ray.kill(blocker)
                ray.wait(list(session.engine._starting))
            add(record)

        session.log.add = make_room
        assert session.measure(toy_grid("full")).measured == 3
        assert len(session.engine._up()) == 2
    assert len(caplog.records) == 1


def test_a_cluster_too_small_for_a_worker_is_refused(ray, options, monkeypatch):
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 0.5}}])
    with pytest.raises(ValueError, match="needs 1 CPU on one node; the nodes of the cluster have 0.5 CPU and 0 GPU"):
        RayEngine(options)


@pytest.mark.parametrize("wrong", ["--model", "--head-scores"])
def test_what_keeps_a_worker_from_starting_is_told_as_by_the_local_engine(ray, toy_dir, tmp_path, capsys, wrong):
    command = ["run", "--tasks", "niah", "--model", str(toy_dir), "-o", str(tmp_path / "out"), "--quiet"]
    command += [wrong, str(tmp_path / "none.json")]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert main([*command, "--engine", "ray", "--workers", "1"]) == 2
    assert capsys.readouterr().err == told
    assert told.count("\n") == 1 and "none.json" in told


def test_a_worker_lost_while_it_loads_is_replaced(ray, options, tmp_path):
    class DeadlyOnce:
        """Kills the first process that loads it."""

        def load(self):
            mark = tmp_path / "loaded"
            if not mark.exists():
                mark.touch()
                os._exit(1)
            return options.load()

    engine = RayEngine(DeadlyOnce(), workers=1)
    assert engine.identifier.run.model["name"] == Path(options.model).name
    engine.close()


def test_workers_that_are_always_lost_while_they_load_end_the_run(ray, monkeypatch):
    class Deadly:
        """Kills the process that loads it."""

        def load(self):
            os._exit(1)

    monkeypatch.setattr(engine_ray, "RETRIES", 1)
    with pytest.raises(ConnectionError, match="2 workers were lost while they loaded the model"):
        RayEngine(Deadly(), workers=1)


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'kvzip-press\[ray\]'"):
        RayEngine(ModelOptions())


def test_what_the_local_engine_has_finished_is_not_measured_again(session, options, tmp_path):
    Session(options.load(), tmp_path / "local", progress=False).measure(toy_grid("full"))
    outcome = Session(session.engine, tmp_path / "local", progress=False).measure(toy_grid("full"))
    assert (outcome.measured, outcome.found) == (0, 3)


def test_the_command_runs_on_ray(ray, toy_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TASKS, "toy", ToyTask())
    command = ["run", "--tasks", "toy", "--limit", "1", "--model", str(toy_dir), "-o", str(tmp_path), "--quiet"]
    assert main([*command, "--engine", "ray", "--workers", "1", "--threads", "1"]) == 0
    assert "2 cells measured, 0 found finished" in capsys.readouterr().out
    assert read_run(tmp_path)["arguments"]["workers"] == 1
    assert main([*command, "--engine", "local", "--threads", "1"]) == 0
    assert "0 cells measured, 2 found finished" in capsys.readouterr().out
