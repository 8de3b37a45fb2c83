"""`launch`, `status`, `logs` and `cancel` of replicas that are jobs of a service: its real client, and a stand-in.

One launch trains; in the others the replicas' jobs run a line of Python instead, which is quicker by tens of seconds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli import launch as launch_module
from composer_replication.cli import main
from composer_replication.diloco.serverless import ReplicaSpec
from composer_replication.diloco.serverless.backends.hf_jobs import HFJobsExecutor
from composer_replication.diloco.serverless.executor import BackendUnavailable
from composer_replication.diloco.serverless.jobs.marks import Marks
from composer_replication.recipe import recipe_from
from composer_replication.store import open_store
from composer_replication.store.signing_key import SIGNING_KEY
from tests.launchers import hf_jobs
from tests.launchers.backend import Backend
from tests.launchers.engine import Container, Engine

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

QUICKSTART = Path(__file__).parent.parent.parent / "recipes" / "quickstart.yaml"
SMALL = ["model.args={width: 16, layers: 1, heads: 2, context: 32}", "data.args={context: 32, batch_size: 4}"]
SMALL += ["training.steps=20", "autoloco.base_horizon=10", "scheduler.warmup_steps=5", "autoloco.warmup_steps=10"]
GROUPS = "fleet.groups=[{executor: hf_jobs}, {executor: local}]"
WAITING = "print('ready'); import sys, threading; sys.stdout.flush(); threading.Event().wait()"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Backend]:
    engine = Engine()
    with contextlib.closing(engine), hf_jobs.backend(engine, monkeypatch) as made:
        monkeypatch.setattr(HFJobsExecutor, "poll_seconds", 0.05)
        monkeypatch.setattr(HFJobsExecutor, "log_pause_seconds", 0.05)
        monkeypatch.chdir(tmp_path)
        yield made
        assert made.unknown == []


@pytest.fixture
def arguments(hub: Backend, tmp_path: Path) -> list[str]:
    """What `launch` is given: two replicas on the service, meeting in a folder that its containers see."""
    options = [f"endpoint={hub.make().endpoint}", "image=registry/image:1", "flavor=cpu-basic", "namespace=team"]
    places = [f"store.uri={(tmp_path / 'store').as_uri()}", f"output={tmp_path / 'run'}", "fleet.replicas=2"]
    own = ["executor=hf_jobs", "executor.backoff_seconds=0", *(f"executor.options.{one}" for one in options)]
    return [str(QUICKSTART), *SMALL, *own, *places]


@pytest.fixture
def instead(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the replicas' jobs run these scripts instead of training."""

    def use(*scripts: str) -> None:
        made = launch_module.make_specs

        def specs(*args: Any, **more: Any) -> Any:
            return [
                replace(spec, command=("python", "-u", "-c", scripts[spec.replica_id % len(scripts)]))
                for spec in made(*args, **more)
            ]

        monkeypatch.setattr(launch_module, "make_specs", specs)

    return use


def jobs_of(hub: Backend) -> list[Container]:
    return sorted(hub.engine.containers, key=lambda container: container.name)


def until_printed(hub: Backend, words: str, count: int = 2) -> None:
    def there() -> bool:
        return sum(any(words in line for line in container.lines) for container in hub.engine.containers) >= count

    hub.engine.wait_for(there)


def test_a_recipe_trains_here_and_as_a_job_and_is_summed_up(
    hub: Backend, arguments: list[str], tmp_path: Path, capsys: Any
) -> None:
    assert main(["launch", *arguments, GROUPS, "--plain"]) == 0, capsys.readouterr()
    output = capsys.readouterr().out
    assert "2 replicas (1 on hf_jobs, 1 on local), 20 steps each" in output and "the same on all replicas" in output
    assert "is a folder: replicas on hf_jobs must have it mounted" in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 20 and len(summary["digests"]) == 1
    assert [one["status"] for one in summary["replicas"].values()] == ["completed", "completed"]
    # What was sent names no place of this machine but the store.
    sent = Marks(open_store(str(tmp_path / "store"))).recipe()
    assert sent is not None
    recipe = recipe_from(sent.decode())
    assert recipe.output is None and recipe.executor.options["namespace"] == "team"
    assert str(tmp_path / "run") not in sent.decode()
    # And afterwards, from anywhere that sees the store.
    assert main(["logs", str(tmp_path / "run"), "--replica", "0"]) == 0
    assert "replica 0: completed" in capsys.readouterr().out
    assert main(["status", (tmp_path / "store").as_uri()]) == 0
    shown = capsys.readouterr().out
    assert "completed (COMPLETED)" in shown and "job-0" in shown and "hf_jobs" in shown
    assert main(["launch", *arguments, GROUPS, "--resume"]) == 0
    assert "there is nothing to resume" in capsys.readouterr().out
    assert len(hub.engine.containers) == 1


def test_a_dry_run_prints_the_requests_with_secrets_masked(
    hub: Backend, arguments: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    import yaml

    key = tmp_path / "signing.key"
    key.write_text("a-signing-key-of-the-tests-0123456789\n")
    key.chmod(0o600)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t-value")
    more = [f"store.signing_key_file={key}", "executor.options.secrets=[AWS_SECRET_ACCESS_KEY]"]
    assert main(["launch", *arguments, *more, "--dry-run"]) == 0
    output = capsys.readouterr().out
    recipe, requests = yaml.safe_load_all(output)
    assert recipe["executor"]["name"] == "hf_jobs" and [one["replica"] for one in requests] == [0, 1]
    payload = requests[1]["payload"]
    assert payload["flavor"] == "cpu-basic" and payload["image"] == "registry/image:1"
    assert payload["secrets"] == {"AWS_SECRET_ACCESS_KEY": "***", SIGNING_KEY: "***"}
    assert "--replica-id=1" in payload["command"] and "--recipe=@recipe" in payload["command"]
    assert "s3cr3t-value" not in output and "a-signing-key" not in output and "Nothing was started" in output
    assert "# data: not read: the replicas run elsewhere" in output
    assert hub.engine.containers == [] and not (tmp_path / "run").exists()


def test_a_signing_key_goes_along_as_a_secret_and_its_file_stays(
    hub: Backend, arguments: list[str], instead: Any, tmp_path: Path, capsys: Any
) -> None:
    key = tmp_path / "signing.key"
    key.write_text("a-signing-key-of-the-tests-0123456789\n")
    key.chmod(0o600)
    instead(f"import os; print(len(os.environ[{SIGNING_KEY!r}]), 'long')")
    assert main(["launch", *arguments, f"store.signing_key_file={key}", "--detach"]) == 0
    until_printed(hub, "37 long")
    stored = b"".join(path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert b"signing.key" not in stored and b"a-signing-key" not in stored


def test_detached_jobs_are_found_read_adopted_and_stopped_from_elsewhere(
    hub: Backend, arguments: list[str], instead: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    instead(WAITING)
    uri = (tmp_path / "store").as_uri()
    assert main(["launch", *arguments, "--detach"]) == 0
    words = capsys.readouterr().out
    assert f"composer-replication cancel {uri}" in words and "launched: replica 0 on hf_jobs (pending)" in words
    until_printed(hub, "ready")
    # Another machine: another folder, and nothing but the store and the service's token.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["status", uri, "--jobs"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{uri}: no run yet") and "running (RUNNING)" in shown
    assert main(["status", uri, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["jobs"]
    assert [(r["replica_id"], r["backend"], r["attempt"], r["own_state"]) for r in rows] == [
        (0, "hf_jobs", 1, "running"),
        (1, "hf_jobs", 1, "running"),
    ]
    monkeypatch.setattr("composer_replication.cli.jobs._QUIET_SECONDS", 0.3)
    assert main(["logs", uri]) == 0
    assert {"0 | ready", "1 | ready"} <= set(capsys.readouterr().out.splitlines())
    assert main(["logs", uri, "--replica", "1"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[-1] == "ready" and f"--replica 1 --after {len(lines)}" in captured.err
    # Launched again it is refused; with --resume it is adopted, and nothing is started twice.
    assert main(["launch", *arguments]) == 2
    assert "there is a launch in" in capsys.readouterr().err
    assert main(["launch", *arguments, "--resume", "--detach"]) == 0
    assert "running already, and looked after from here: replica 0 on hf_jobs (running)" in capsys.readouterr().out
    assert len(hub.engine.containers) == 2
    assert main(["launch", *arguments, GROUPS, "--resume"]) == 2
    assert "replica 1 on hf_jobs (running): not where this recipe has it" in capsys.readouterr().err
    # Even if the launcher died before it could write down what it had started.
    for path in (tmp_path / "store" / "launch" / "handles").iterdir():
        path.unlink()
    assert main(["status", uri, "--jobs"]) == 0
    shown = capsys.readouterr().out
    assert "job-0" in shown and "job-1" in shown
    assert main(["cancel", uri, "--replica", "0"]) == 0
    hub.engine.wait_for(lambda: jobs_of(hub)[0].ended == "stopped")
    assert jobs_of(hub)[1].running
    assert main(["cancel", uri]) == 0
    shown = capsys.readouterr().out
    assert "replica 0: cancelled already" in shown and "replica 1: asked hf_jobs to stop job job-" in shown
    assert main(["logs", uri, "--replica", "1", "--follow", "--after", str(len(lines))]) == 0  # to its end
    assert "it was asked to stop" in capsys.readouterr().out or jobs_of(hub)[1].ended == "stopped"


def test_ctrl_c_stops_the_jobs_and_says_how_to_go_on(
    hub: Backend, arguments: list[str], instead: Any, monkeypatch: Any, capsys: Any
) -> None:
    instead(WAITING)
    interrupted: list[bool] = []

    def wait(self: HFJobsExecutor, handles: Any, seconds: float) -> None:
        if not interrupted:
            until_printed(hub, "ready")
            interrupted.append(True)
            raise KeyboardInterrupt
        self.sleep(seconds)

    monkeypatch.setattr(HFJobsExecutor, "wait", wait)
    assert main(["launch", *arguments, "--plain"]) == 130
    assert [container.ended for container in hub.engine.containers] == ["stopped", "stopped"]
    output = capsys.readouterr().out
    assert "stopping; a replica has 20 s" in output and "launch run/recipe.yaml --resume" in output


def test_ctrl_c_while_jobs_are_sent_stops_those_that_were_taken(
    hub: Backend, arguments: list[str], instead: Any, monkeypatch: Any, capsys: Any
) -> None:
    instead(WAITING)
    launched = HFJobsExecutor.launch_replicas

    def launch(self: HFJobsExecutor, specs: Any) -> Any:
        launched(self, specs[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(HFJobsExecutor, "launch_replicas", launch)
    assert main(["launch", *arguments, "--plain"]) == 130
    assert [container.ended for container in hub.engine.containers] == ["stopped"]


def test_restarts_are_told_with_the_budget_of_the_place(
    hub: Backend, arguments: list[str], instead: Any, capsys: Any
) -> None:
    instead("pass", "raise SystemExit(1)")
    groups = "fleet.groups=[{executor: local}, {executor: hf_jobs, options: {restarts: 1, error_restarts: 1}}]"
    assert main(["launch", *arguments, groups, "executor.restarts=7", "--plain"]) == 1
    output = capsys.readouterr().out
    assert "replica 1: " in output and "restart 1 of 2" in output


def test_a_failing_job_is_named_its_log_is_shown_and_the_others_are_stopped(
    hub: Backend, arguments: list[str], instead: Any, tmp_path: Path, capsys: Any
) -> None:
    instead(WAITING, "print('a bug in the model'); raise SystemExit(1)")
    assert main(["launch", *arguments, "--plain"]) == 1
    captured = capsys.readouterr()
    assert "replica 1 failed: an exception in its code" in captured.err and "| a bug in the model" in captured.err
    assert "the others can't go on without it and are stopped" in captured.out
    replicas = json.loads((tmp_path / "run" / "summary.json").read_text())["replicas"]
    assert [replicas[name]["status"] for name in "01"] == ["cancelled", "failed"]


@pytest.mark.parametrize("policy", ["strict", "skip"])
def test_one_place_that_does_not_answer_stops_a_strict_fleet_before_it_starts_and_a_skipping_one_not(
    hub: Backend, arguments: list[str], instead: Any, tmp_path: Path, monkeypatch: Any, capsys: Any, policy: str
) -> None:
    def down(*_: Any) -> Any:
        raise BackendUnavailable("no route to it")

    monkeypatch.setattr(HFJobsExecutor, "check", down)
    instead("pass")
    groups = "fleet.groups=[{executor: hf_jobs}, {executor: local, count: 2}]"
    fleet = [groups, "fleet.replicas=3", f"fleet.failure_policy={policy}"]
    code = main(["launch", *arguments, *fleet, "--plain"])
    error = capsys.readouterr().err
    if policy == "strict":
        assert code == 2 and "no route to it" in error and not (tmp_path / "run").exists()
        return
    assert "going on without the answer of one place: no route to it" in error
    assert "replica 0 failed: no route to it" in error
    replicas = json.loads((tmp_path / "run" / "summary.json").read_text())["replicas"]
    assert [replicas[name]["status"] for name in "012"] == ["failed", "completed", "completed"]
    assert hub.engine.containers == []
    # `plan` and a dry run tell of it in any case.
    assert main(["launch", *arguments, *fleet, "--dry-run"]) == 2


def test_a_launch_that_one_place_takes_only_in_part_is_undone(
    hub: Backend, arguments: list[str], instead: Any, monkeypatch: Any, capsys: Any
) -> None:
    instead(WAITING)
    monkeypatch.setattr(HFJobsExecutor, "submit_attempts", 1)
    hub.engine.refuse("quota")
    more = ["executor.options.max_concurrent_launches=1", "--detach"]
    assert main(["launch", *arguments, *more]) == 1
    error = capsys.readouterr().err
    assert "replica 0 was not taken by hf_jobs" in error and "the others can't go on without it" in error
    hub.engine.wait_for(lambda: all(container.ended == "stopped" for container in hub.engine.containers))
    assert len(hub.engine.containers) == 1


def test_code_is_sent_along_and_is_the_working_directory(
    hub: Backend, arguments: list[str], instead: Any, tmp_path: Path, capsys: Any
) -> None:
    code = tmp_path / "code"
    (code / "mine").mkdir(parents=True)
    (code / "mine" / "__init__.py").write_text("WORD = 'from-the-sent-code'\n")
    (code / ".env").write_text("PASSWORD=s3cr3t-value\n")
    instead("import mine, os; print(mine.WORD, sorted(os.listdir()))")
    assert main(["launch", *arguments, f"executor.code={code}", "--detach"]) == 0
    until_printed(hub, "from-the-sent-code ['mine']")
    stored = b"".join(path.read_bytes() for path in (tmp_path / "store").rglob("*.json"))
    assert str(code).encode() not in stored


def test_of_a_fleet_in_two_places_only_what_leaves_this_machine_is_shown(
    hub: Backend, arguments: list[str], capsys: Any
) -> None:
    import yaml

    assert main(["launch", *arguments, GROUPS, "--detach"]) == 2
    assert "end with the launcher" in capsys.readouterr().err
    assert main(["launch", *arguments, GROUPS, "--dry-run"]) == 0
    _, requests = yaml.safe_load_all(capsys.readouterr().out)
    assert [(one["replica"], one["back end"]) for one in requests] == [(0, "hf_jobs")]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["store.uri=null"], "such as store.uri=hf://datasets/OWNER/RUNS/NAME"),
        (["store.uri=memory://x"], "is this process's own"),
        (["executor.options.flavour=a"], "hf_jobs has no option 'flavour'. Did you mean 'flavor'?"),
        (["executor.options.code=x"], "executor.options.code: say it with executor.code"),
        (["executor.options.flavor=cpu-basik"], "Did you mean 'cpu-basic'?"),
        (["executor.options.image=null"], "needs an image"),
        (["executor.options.time_limit_hours=9000"], "executor.options: time_limit_hours=9000"),
        (["executor.options.secrets=[NOT_SET_ANYWHERE]"], "secrets: NOT_SET_ANYWHERE isn't set"),
        (["executor.code=/no/such/folder"], "executor.code: there is no folder"),
        (["executor.restarts=-1"], "executor.restarts"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(
    hub: Backend, arguments: list[str], tmp_path: Path, capsys: Any, more: list[str], words: str
) -> None:
    assert main(["launch", *arguments, *more]) == 2
    assert words in capsys.readouterr().err
    assert hub.engine.containers == [] and not (tmp_path / "run").exists()


def test_another_machine_is_told_what_it_cannot_do(hub: Backend, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "store").mkdir()
    for command in ("logs", "cancel"):
        assert main([command, str(tmp_path / "store")]) == 2
        assert "knows of no jobs" in capsys.readouterr().err
    assert main(["logs", str(tmp_path / "store"), "--after", "3"]) == 2
    assert "give --replica, too" in capsys.readouterr().err


def test_jobs_of_a_program_without_a_recipe_are_found_by_their_back_end(
    hub: Backend, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    executor, uri = hub.make(), (tmp_path / "store").as_uri()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", executor.endpoint)
    spec = ReplicaSpec(0, 1, uri, command=("python", "-c", "print('by a program')"))
    executor.collect(executor.launch_replicas([spec]), timeout=60)
    assert main(["logs", uri]) == 0 and main(["cancel", uri]) == 0
    output = capsys.readouterr().out
    assert "by a program" in output and "replica 0: completed already" in output
    assert main(["logs", uri, "--replica", "4"]) == 2
    assert "there are jobs of replicas 0" in capsys.readouterr().err
