"""The command line without a fleet: help, schedules, status, mistakes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest

from composer_replication.cli import main
from composer_replication.cli.live import FleetView, Row, Screen, lines
from composer_replication.cli.schedule import plot
from composer_replication.cli.summary import summarise
from composer_replication.cli.view import ClosedRound
from composer_replication.readable import amount, byte_count, duration
from composer_replication.recipe import load_recipe, recipe_from


def output(capsys, *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def horizons(capsys, text: str) -> list[int]:
    answer = json.loads(output(capsys, "schedule", *text.split(), "--json"))
    assert set(answer) == {"rounds", "horizons"} and answer["rounds"] == len(answer["horizons"])
    return answer["horizons"]


def test_the_published_schedules(capsys):
    c4 = "--steps 50000 --base 500 --warmup 1000"
    golden = [500] * 7 + [550] * 5 + [600] * 5 + [650] * 5 + [700] * 5 + [750] * 45 + [250]
    assert len(golden) == 73
    for more in ("", " --decay linear", " --policy staircase"):
        assert horizons(capsys, c4 + more) == golden
    chat = "--steps 6490 --base 100 --warmup 200"
    first = [100] * 7 + [110] * 5 + [120] * 5 + [130] * 5
    assert horizons(capsys, chat) == [*first, *[150] * 26, 90]
    linear = [*first, *[140] * 5, *[150] * 21, 140]
    assert horizons(capsys, f"{chat} --decay linear") == linear
    assert horizons(capsys, f"{chat} --final-fraction 0.1") == linear
    qsr = horizons(capsys, f"{c4} --policy qsr")
    assert len(qsr) == 41 and statistics.median(qsr) == 603
    assert horizons(capsys, f"{c4} --policy qsr --peak-lr 4e-4 --alpha {500**0.5 * 4e-4}") == qsr
    assert horizons(capsys, "--steps 50000 --base 500 --policy linear") == [*range(10, 1000, 10), 500]
    assert horizons(capsys, f"{c4} --policy fixed") == [500] * 100


def test_the_grid_and_the_bounds_are_options(capsys):
    bounded = horizons(capsys, "--steps 20000 --base 100 --max 130 --step 15 --growth-cap 1.2")
    assert set(bounded[:-1]) == {100, 115, 130}


def test_a_schedule_for_people(capsys):
    text = output(capsys, "schedule", "--steps", "50000", "--base", "500", "--warmup", "1000")
    assert text.startswith("73 rounds for 50000 steps; a fixed interval of 500 takes 100 (73 %)\n")
    assert "500×7, 550×5, 600×5, 650×5, 700×5, 750×45, 250×1" in text
    many = output(capsys, "schedule", "--steps", "50000", "--base", "10", "--policy", "linear")
    assert "10×1, 20×1" in many and "..." in many


def test_the_plot_is_as_high_as_the_intervals():
    rows = plot([10, 10, 20, 20, 20], width=16, height=2)
    assert rows == ["20 ┤    ████████████", " 0 ┤████████████████", "   └────────────────", "    0       80 steps"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0", "--base", "10"], "steps must be at least 1"),
        (["--steps", "100", "--base", "0"], "--base must be"),
        (["--steps", "100", "--base", "10", "--max", "5"], "--max must be at least base_horizon"),
        (["--steps", "100", "--base", "10", "--policy", "qrs"], "did you mean 'qsr'"),
        (["--steps", "100", "--base", "10", "--alpha", "2"], "'alpha'"),
        (["--steps", "100", "--base", "10", "--warmup", "101"], "warmup"),
    ],
)
def test_a_wrong_schedule_is_one_sentence(capsys, arguments, words):
    error = output(capsys, "schedule", *arguments, code=2)
    assert words in error and error.count("\n") == 1


def test_status_without_a_run(capsys, tmp_path):
    assert "no fleet.json" in output(capsys, "status", str(tmp_path), code=2)
    assert "isn't there" in output(capsys, "status", str(tmp_path / "no"), code=2)
    assert "no store for s4://" in output(capsys, "status", "s4://host/x", code=2)
    assert "--every" in output(capsys, "status", str(tmp_path), "--every", "0", code=2)


RECIPE = """\
name: small
model: {name: byte_gpt, args: {width: 16, layers: 1, heads: 2, context: 16}}
data: {name: text_bytes, args: {context: 16, max_bytes: 50000, validation_bytes: 5000}}
training: {steps: 40}
autoloco: {base_horizon: 10}
"""


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE + f"output: {tmp_path}/run\n")
    return str(file)


def test_a_dry_run_shows_the_whole_recipe_and_starts_nothing(capsys, recipe, tmp_path):
    text = output(capsys, "launch", recipe, "--dry-run", "fleet.replicas=3")
    assert recipe_from(text).fleet.replicas == 3  # what is printed is a recipe
    assert (
        "# fine: 3 replicas, 40 steps each, policy autoloco, 4 rounds at least (4 with a fixed interval of 10)" in text
    )
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.stepz=3", "'steps'"),
        ("model.args.widht=3", "'width'"),
        ("model.name=byte_gtp", "'byte_gpt'"),
        ("data.args.path=/nowhere", "/nowhere"),
        ("model.args.width=15", "model.args: width must be"),
        ("optimizer.name=adamm", "adamw"),
        ("optimizer.args.betaz=1", "betaz"),
        ("data.args.context=32", "longer than the model's"),
        ("store.uri=s4://x/y", "no store for s4://"),
        ("store.uri=/dev/null/x", "/dev/null/x"),
    ],
)
def test_a_wrong_recipe_is_one_sentence_and_nothing_is_started(capsys, recipe, tmp_path, override, words):
    error = output(capsys, "launch", recipe, override, code=2)
    assert words in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_package.Model", "no_such_package"),
        ("json.JSONDecoderr", "'JSONDecoder'"),
        ("Model", "import path"),
    ],
)
def test_an_own_class_that_is_not_there(capsys, recipe, path, words):
    assert words in output(capsys, "launch", recipe, "model.name=null", f"model.class={path}", "--dry-run", code=2)


def test_a_store_that_is_in_use_is_refused_with_the_remedy(capsys, recipe, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "fleet.json").write_text("{}")
    error = output(capsys, "launch", recipe, f"store.uri={tmp_path}/store", code=2)
    assert "there is a run" in error and "--resume" in error
    assert "there is no run" in output(capsys, "launch", recipe, "--resume", code=2)


def test_options_and_overrides_may_come_in_any_order(capsys, recipe):
    assert "steps: 44" in output(capsys, "launch", "--dry-run", recipe, "--plain", "training.steps=44")
    with pytest.raises(SystemExit) as stopped:
        main(["launch", recipe, "training.steps=44", "--dyr-run"])
    assert stopped.value.code == 2


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["schedule", "--steps", "50", "--base", "5"]])
def test_help_and_schedules_load_neither_torch_nor_a_trainer(arguments):
    program = (
        "import sys\nfrom composer_replication.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'lightning', 'numpy', 'matplotlib', 'omegaconf', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout


def test_a_replica_is_told_by_its_entry_point(capsys):
    assert "replica_entrypoint" in output(capsys, "replica")


def test_a_table_in_plain_text():
    rows = [
        Row(
            replica=0,
            state="training",
            round=3,
            step=70,
            horizon=20,
            loss=2.5,
            tokens_per_second=12345.6,
            wait_seconds=0.1,
        ),
        Row(replica=1, state="joining"),
    ]
    title, head, first, second = lines(FleetView(title="run", rows=rows, round=3, steps=100))
    assert title == "run" and head.split() == [
        "replica",
        "round",
        "step",
        "horizon",
        "loss",
        "tokens/s",
        "wait",
        "state",
    ]
    assert first.split() == ["0", "3", "70/100", "20", "2.500", "12.3k", "0.1", "s", "training"]
    assert second.split() == ["1", "–", "–", "–", "–", "–", "–", "joining"]


def test_plain_lines_come_when_something_has_changed(capsys):
    rows = [Row(replica=0, state="training", round=1, step=20, horizon=20, loss=3.0, tokens_per_second=2e3)]
    with Screen(plain=True) as screen:
        for step in (20, 25):
            rows[0] = Row(replica=0, state="training", round=1, step=step, horizon=20, loss=3.0, tokens_per_second=2e3)
            screen.show(FleetView(title="run", rows=rows, round=1, steps=40))
        screen.show(FleetView(title="run", rows=[Row(replica=0, state="finished")], round=2, steps=40))
    assert capsys.readouterr().out.splitlines() == [
        "round 1  step 20/40  horizon 20  loss 3.000  2k tokens/s  1 training",
        "round 2  1 finished",
    ]


@pytest.mark.parametrize(("columns", "table"), [(80, True), (60, False)])
def test_a_table_where_it_fits_and_lines_where_not(capsys, monkeypatch, columns, table):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    many = Row(
        replica=0, state="finished", round=7, step=50000, horizon=20, loss=3.0, tokens_per_second=12345, wait_seconds=10
    )
    with Screen(plain=False) as screen:
        screen.show(FleetView(title="run", rows=[Row(replica=0, state="joining")], round=0, steps=50000))
        screen.show(FleetView(title="run", rows=[many], round=7, steps=50000))
    shown = capsys.readouterr().out
    assert "…" not in shown and "50000/50000" in shown
    assert ("12.3k │" in shown) == table
    assert ("round 0  1 joining\n" in shown) != table


def test_a_launch_says_at_once_what_it_does(capsys, recipe):
    assert main(["launch", recipe, "training.stepz=3"]) == 2
    assert capsys.readouterr().out == f"checking {recipe} ...\n"


def test_a_recipe_that_is_not_there(capsys, tmp_path):
    error = output(capsys, "launch", str(tmp_path / "no.yaml"), code=2)
    assert "Errno" not in error and error.count("no.yaml") == 1 and "recipes/quickstart.yaml" in error
    assert "Is a directory" in output(capsys, "launch", str(tmp_path), code=2)


@pytest.mark.parametrize(("warm_up", "first"), [(0, 60), (20, 70), (25, 80)])  # 7 intervals in the published one
def test_the_summary_of_a_short_run_says_when_the_interval_would_adapt(capsys, recipe, tmp_path, warm_up, first):
    loaded = load_recipe(recipe, [f"autoloco.warmup_steps={warm_up}", "training.steps=400"])
    words = f"(the interval starts to adapt after step {first};"
    for extra in (0, 10):
        count = first // 10 + extra // 10
        closed = [
            ClosedRound(round=i, steps=10, position=10 * (i + 1), members=(0, 1), tokens=None) for i in range(count)
        ]
        summarise(loaded, tmp_path, closed, [], seconds=1.0)
        told = capsys.readouterr().out
        assert (words in told) == (extra == 0)
        assert "took           1.0 s, from the launch to the last replica's end\n" in told


def test_numbers_for_people():
    assert [amount(v) for v in (0.5, 999, 12345, 2e6, 3.456e9)] == ["0.5", "999", "12.3k", "2M", "3.46G"]
    assert [byte_count(v) for v in (0, 1500, 2.5e6, 1e9, 7e12)] == ["0 B", "1.5 kB", "2.5 MB", "1 GB", "7 TB"]
    assert [duration(v) for v in (0.04, 59, 75, 3700)] == ["0.0 s", "59 s", "1 min 15 s", "1 h 01 min"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["statu", "x"], ["there is no command 'statu'", "Did you mean 'status'?"]),
        (["launch", "r.yaml", "--dryrun"], ["composer-replication launch", "--dryrun", "Did you mean '--dry-run'?"]),
        (["doctor", "memory://x", "--replica", "2", "more"], ["usage: composer-replication doctor", "more"]),
    ],
)
def test_a_mistyped_command_or_option(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and all(word in error for word in words), error


def test_without_a_command_there_is_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0 and "commands, in the order" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["s3://bucket/run", "--member", "foo"], "--member has no meaning for s3://, which takes --partition and"),
        (["gs://bucket/run", "--kms-key", "foo"], "--kms-key has no meaning for gs://, which takes --member"),
        (["az://bucket/run", "--partition", "aws-cn"], "--partition has no meaning for az://"),
    ],
)
def test_options_of_another_cloud_are_refused(capsys, arguments, words):
    assert words in output(capsys, "policy", *arguments, code=2)


def test_what_else_a_bucket_binding_needs_is_said(capsys):
    assert "storage.objects.list" in output(capsys, "policy", "gs://bucket/run")


def test_all_that_is_wrong_is_told_at_once_with_the_remedy(capsys, recipe):
    wrong = ["training.steps=50", "scheduler.warmup_steps=60", "executor.name=modl"]
    error = output(capsys, "launch", recipe, *wrong, "--dry-run", code=2)
    assert "(add scheduler.warmup_steps=5, or another number)" in error and "Did you mean 'modal'?" in error
