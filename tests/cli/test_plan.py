"""`plan`: what a launch would come to. The service is asked through its real client; nothing is started."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import composer_replication
from composer_replication.cli import main
from composer_replication.cli.prices import Price, Prices, break_even
from composer_replication.recipe.backends import BACKENDS
from tests.launchers import hf_jobs
from tests.launchers.backend import Backend
from tests.launchers.engine import Engine

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

QUICKSTART = str(Path(__file__).parent.parent.parent / "recipes" / "quickstart.yaml")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    engine = Engine()
    with contextlib.closing(engine), hf_jobs.backend(engine, monkeypatch) as made:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name, raising=False)
        yield made
        assert made.unknown == [] and engine.containers == []


@pytest.fixture
def arguments(hub: Backend) -> list[str]:
    options = [f"endpoint={hub.make().endpoint}", "image=registry/image:1", "flavor=a100-large", "namespace=team"]
    own = ["executor=hf_jobs", *(f"executor.options.{one}" for one in options)]
    return ["plan", QUICKSTART, *own, "store.uri=s3://bucket/runs/one"]


def output(capsys: Any, *arguments: str, code: int = 0) -> str:
    assert main(list(arguments)) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err + captured.out


def test_it_says_what_a_launch_would_come_to(
    arguments: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t-value")
    more = ["executor.options.secrets=[AWS_SECRET_ACCESS_KEY]", "executor.requirements=[einops==0.8.0]"]
    shown = output(capsys, *arguments, *more, "--step-seconds", "2")
    for words in (
        "4 replicas (4 on hf_jobs), 1200 steps each",
        "replicas 0 to 3 on hf_jobs",
        "24 h a job (at most 720 h there), up to 3 more of them",
        "pip installs  einops==0.8.0",
        "the launcher, to reach hf_jobs: HF_TOKEN (set)",
        "the launcher, to reach the store: AWS_ACCESS_KEY_ID (not set)",
        "the replicas, handed over: AWS_SECRET_ACCESS_KEY (set)",
        "$2.50 an hour each, a100-large",
        "$10.00 an hour (list prices of 2026-05-26)",
        "48 at least; 60 with a fixed interval",
        "Nothing was started.",
    ):
        assert words in shown
    assert "s3cr3t-value" not in shown and "hf_a-token" not in shown
    shown = output(capsys, *arguments, *more, "--json")  # holds more than is told in words
    assert json.loads(shown)["groups"][0]["handed_over"] == ["AWS_SECRET_ACCESS_KEY"]
    assert "s3cr3t-value" not in shown and "hf_a-token" not in shown


def test_the_numbers_are_those_of_the_rounds(arguments: list[str], capsys: Any) -> None:
    more = ["codec=float32", "fleet.replicas=2", "--parameters", "1G", "--bandwidth", "800", "--step-seconds", "3"]
    values = json.loads(output(capsys, *arguments, *more, "--json"))
    found = values["round"]
    # Two replicas, each averages half: 4 GB up and its half of the mean; half of the other's 4 GB and half of the mean.
    assert found["up_bytes"] == pytest.approx(6e9, rel=0.02) and found["down_bytes"] == pytest.approx(4e9, rel=0.02)
    # At 100 MB/s: 40 s for the contribution, beside which the other's is read, then 20 s for the mean; and requests.
    requests = 0.05 * (8 + found["requests"] / 8)
    assert found["seconds"] == pytest.approx(60 + requests, rel=0.02) and requests < 6
    costs = values["costs"]
    assert costs["hours"] == pytest.approx((1200 * 3 + values["rounds"]["least"] * found["seconds"]) / 3600)
    assert costs["usd"] == pytest.approx(5.0 * costs["hours"])
    assert values["groups"][0]["jobs"] == [f"{values['groups'][0]['jobs'][0][:-4]}r{i}-0" for i in range(2)]
    assert values["groups"][0]["command"][:3] == [
        "python",
        "-m",
        "composer_replication.diloco.serverless.jobs.container",
    ]


def test_a_model_of_the_users_own_is_not_built(
    arguments: list[str], capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "composer_replication.diloco.serverless.components.build_model", lambda recipe: pytest.fail("built")
    )
    mine = tmp_path / "mine.yaml"
    mine.write_text("model: {class: 'collections:OrderedDict'}\ndata: {name: text_bytes}\n")
    shown = output(capsys, "plan", str(mine), *arguments[2:])
    assert "say how large the model is, --parameters 1.3B" in shown and "isn't in the recipe" in shown
    assert "1.3G parameters" in output(capsys, "plan", str(mine), *arguments[2:], "--parameters", "1.3B")


def test_what_a_service_would_refuse_is_refused(arguments: list[str], capsys: Any, monkeypatch: Any) -> None:
    shown = output(capsys, *arguments, "executor.options.flavor=a100-larg", code=2)
    assert "REFUSED       flavor 'a100-larg' isn't known. Did you mean 'a100-large'?" in shown
    assert "hf_jobs would refuse it." in shown
    assert "secrets: NOT_SET isn't set" in output(
        capsys, *arguments, "executor.options.secrets=[NOT_SET]", "--json", code=2
    )
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    assert "refuses the token" in output(capsys, *arguments, "executor.options.namespace=null", code=2)


def test_a_store_that_only_this_machine_has_is_warned_of(arguments: list[str], capsys: Any, tmp_path: Path) -> None:
    code = Path(composer_replication.__file__).parent
    more = [f"store.uri={tmp_path.as_uri()}", f"data.args.path={code}"]
    shown = output(capsys, *arguments, *more)
    assert "mind: store.uri" in shown and "must have it mounted under the same path" in shown
    assert f"mind: path: {code} is a path, which replicas elsewhere must have, too" in shown


def test_the_policy_of_each_places_identity(arguments: list[str], capsys: Any) -> None:
    groups = "fleet.groups=[{executor: hf_jobs, options: {secrets: [HF_TOKEN]}}, {executor: local}]"
    shown = output(capsys, *arguments, groups, "--policy")
    assert shown.count('"arn:aws:s3:::bucket/runs/one/*"') == 1
    assert "# hf_jobs: access for the one that HF_TOKEN belong to\n# local: access for whoever runs" in shown
    values = json.loads(output(capsys, *arguments, groups, "--policy", "--json"))
    assert [one["policy"]["Statement"][0]["Sid"] for one in values["access"]] == ["ListRun", "ListRun"]
    shown = output(capsys, *arguments, "store.uri=s3a://bucket/runs/one")  # another name for s3
    assert "the launcher, to reach the store: AWS_ACCESS_KEY_ID" in shown
    shown = output(capsys, *arguments, "store.uri=hf://datasets/me/runs/one", "--policy")
    assert "access by prefix is for s3://, gs:// and az://" in shown


def test_a_recipe_of_this_machine_can_be_planned_too(capsys: Any) -> None:
    shown = output(capsys, "plan", QUICKSTART)
    assert "replicas 0 to 3 on local" in shown and "cost          not known" in shown
    assert "restarts      3, after errors of its own 0" in shown
    shown = output(capsys, "plan", QUICKSTART, "executor.restarts=7", "executor.options.error_restarts=5")
    assert "restarts      7, after errors of its own 5" in shown


def test_ones_own_prices_go_over_the_table(arguments: list[str], capsys: Any, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("dated: 2026-11-01\nhf_jobs: {a100-large: 1.5}\nvolcano: {'*': 1.2}\n")
    shown = output(capsys, *arguments, "--prices", str(mine))
    assert "$1.50 an hour each" in shown and "2026-11-01, " in shown and "$6.00 an hour" in shown
    assert Prices(mine).of("volcano", {"gpus": 8}).usd_per_hour == pytest.approx(9.6)  # type: ignore[union-attr]
    for text, words in {
        "hf_jobs: 3": "hf_jobs must hold prices",
        "hf_jobs: {x: cheap}": "hf_jobs.x must be dollars an hour, not 'cheap'",
        "[1]": "must hold back ends",
        "{": "neither JSON nor YAML",
    }.items():
        mine.write_text(text)
        assert words in output(capsys, *arguments, "--prices", str(mine), code=2)
    assert "can't be read: No such file" in output(capsys, *arguments, "--prices", "nowhere", code=2)


def test_the_table_is_of_the_back_ends_that_there_are() -> None:
    prices = Prices()
    assert set(prices._tables) == set(BACKENDS)
    h100 = prices.of("modal", {"gpu": "H100:8"})
    assert h100 is not None and (h100.gpus, h100.usd_per_hour) == (8, pytest.approx(8 * 3.949))
    assert prices.of("modal", {"gpu": "RTX"}) is None and prices.of("local", {}) is None
    two = prices.of("runpod", {"gpu_type": "NVIDIA H100 PCIe", "gpu_count": 2})
    assert two is not None and two.usd_per_gpu_hour == pytest.approx(4.18)


def test_the_break_even_is_where_both_cost_the_same() -> None:
    prices = Prices()
    nodes = prices.nodes("H100", 4)
    assert nodes and all(node.gpus >= 4 and node.gpu == "H100" for node in nodes.values())
    modal = prices.of("modal", {"gpu": "H100"})
    assert modal is not None
    seconds, horizon = 30.0, 500
    found = break_even([modal] * 4, nodes, round_seconds=seconds, horizon=horizon)
    assert found is not None and found.step_seconds is not None and 0 < found.share < 1
    # With steps of just that length, a GPU-hour of training costs the same in both.
    share = seconds / (seconds + horizon * found.step_seconds)
    assert share == pytest.approx(found.share)
    assert modal.usd_per_gpu_hour / (1 - share) == pytest.approx(nodes[found.node].usd_per_gpu_hour)
    dear = Price("x", 100.0, "H100", 1, False, "", "")
    never = break_even([dear], nodes, round_seconds=seconds, horizon=horizon)
    assert never is not None and never.share < 0 and never.step_seconds is None
    assert break_even([], nodes, round_seconds=1.0, horizon=1) is None


def test_the_break_even_in_words(arguments: list[str], capsys: Any) -> None:
    shown = output(capsys, *arguments, "fleet.replicas=8")
    assert "one big node  hf_jobs/8xa100-large, $2.50 for a GPU-hour, against" not in shown
    assert "cheaper in any case: hf_jobs/8xa100-large, $2.50 for a GPU-hour, against $2.50" in shown
    shown = output(capsys, *arguments, "--node", "sagemaker/ml.p4de.24xlarge")
    assert "the fleet is the cheaper one while it spends less than" in shown and "51 % of its time" in shown
    shown = output(capsys, *arguments, "--node", "sagemaker/ml.p4de.24xlarg", code=2)
    assert "Did you mean 'sagemaker/ml.p4de.24xlarge'?" in shown


@pytest.mark.parametrize("option", ["--bandwidth", "--step-seconds"])
def test_numbers_that_mean_nothing_are_refused(arguments: list[str], capsys: Any, option: str) -> None:
    assert f"{option} must be a positive number" in output(capsys, *arguments, option, "0", code=2)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan", "f / (1 - s) < n"),
        ("launch", "--resume' finds the jobs, starts none twice"),
        ("logs", "--replica 0 --follow"),
        ("cancel", "is cancelled isn't started again"),
        ("status", "with --jobs the services are asked"),
    ],
)
def test_help_teaches_and_its_lines_fit(command: str, words: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and words in shown and "examples:" in shown
    assert max(map(len, shown.splitlines())) <= 120
