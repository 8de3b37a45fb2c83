"""Files that are damaged, half written, old, empty or still growing: what can be read is given, and the rest named."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_replication.report import page, payload, read_file, run_from_json
from composer_replication.report.groups import group_runs
from composer_replication.report.rounds import tidy_rounds
from tests.report.samples import round_json, run_json


def lines(*values: Any) -> str:
    return "".join(f"{json.dumps(one)}\n" for one in values)


def test_several_runs_of_a_file_plain_and_compressed(tmp_path: Path) -> None:
    text = lines(run_json(seed=1), run_json(seed=2), run_json("fixed"))
    (tmp_path / "runs.jsonl").write_text(text)
    (tmp_path / "runs.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    plain, packed = (read_file(tmp_path / name) for name in ("runs.jsonl", "runs.jsonl.gz"))
    assert [(run.policy, run.seed) for run in plain] == [("autoloco", 1), ("autoloco", 2), ("fixed", 1)]
    assert [run.rounds for run in packed] == [run.rounds for run in plain]
    assert all(run.ended and run.notices == () for run in plain)


def test_json_over_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(run_json(seed=4), indent=1))
    (run,) = read_file(path)
    assert run.seed == 4 and run.notices == ()
    path.write_text(json.dumps([run_json(seed=4), run_json(seed=5)], indent=1))
    assert [run.seed for run in read_file(path)] == [4, 5]


def test_a_half_written_line_is_named_and_the_rest_is_there(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(lines(run_json(seed=1), run_json(seed=2)) + json.dumps(run_json(seed=3))[:500])
    runs = read_file(path)
    assert [run.seed for run in runs] == [1, 2]
    assert runs[-1].notices == ("line 3 isn't whole JSON (half written, or damaged), and is left out",)
    notices = payload(runs)["notices"]
    assert len(notices) == 1 and "line 3" in notices[0] and str(path) in notices[0]


def test_a_compressed_file_that_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl.gz"
    noise = {"noise": os.urandom(4000).hex()}  # so that what is cut off is more than what a decoder holds back
    packed = gzip.compress(lines(run_json(seed=1), run_json(seed=2) | noise).encode())
    path.write_bytes(packed[:-2000])
    (run,) = read_file(path)
    assert run.seed == 1
    assert run.notices == ("the file ends in the middle of its compressed data, after line 1: copy it again",)
    path.write_bytes(packed[:5])
    with pytest.raises(ValueError, match="middle of its compressed data, before its first line is whole: copy it agai"):
        read_file(path)
    path.write_bytes(packed[:100] + b"\0" * 100 + packed[200:])
    with pytest.raises(ValueError, match="compressed data is damaged"):
        read_file(path)


def test_a_mark_of_the_encoding_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    for text in (lines(run_json(seed=1), run_json(seed=2)), json.dumps([run_json(seed=1), run_json(seed=2)], indent=1)):
        path.write_text(text, encoding="utf-8-sig")
        runs = read_file(path)
        assert [run.seed for run in runs] == [1, 2] and all(run.notices == () for run in runs)


def test_rounds_alone(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    values = run_json()
    (folder / "rounds.jsonl").write_text(lines(*values["rounds"][:-1], {**values["rounds"][-1], "observation": None}))
    (run,) = read_file(folder / "rounds.jsonl")
    assert (run.name, len(run.rounds), run.replicas, run.policy, run.base_horizon) == ("one", 8, 2, "autoloco", 10)
    assert run.notices == () and run.ended is None
    (folder / "rounds.jsonl").write_text(lines(*values["rounds"][:4]))
    (half,) = read_file(folder / "rounds.jsonl")
    said = "whether it went on after step 44 isn't known: it has no end, and no number of steps"
    assert half.notices == (said,) and half.ended is None


def test_a_run_and_its_rounds_in_lines_of_their_own(tmp_path: Path) -> None:
    values = run_json(seed=7)
    head = {name: value for name, value in values.items() if name != "rounds"}
    path = tmp_path / "rounds.jsonl"
    path.write_text(lines(head, *values["rounds"], run_json(seed=8)))
    runs = read_file(path)
    assert [(run.seed, len(run.rounds)) for run in runs] == [(7, 8), (8, 8)]
    assert runs[0].rounds == runs[1].rounds and runs[0].settings == runs[1].settings


def test_another_version_is_named_and_shown(tmp_path: Path) -> None:
    old = run_json(version=1, validation_loss=1.5, result=None)
    (run,) = [run_from_json(old, source="old.jsonl")]
    assert "it is of version 1, and this package reads version 2" in run.notices[0]
    assert len(run.rounds) == 8 and run.result == {"validation_loss": 1.5}


@pytest.mark.parametrize("text", ["", "\n\n", "nonsense", "[1, 2]\n", '{"a": 1}\n'])
def test_nothing_of_a_run(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="empty: no run" if not text.strip() else "line 1 .* no run could be read"):
        read_file(path)


def test_a_run_that_is_not_finished() -> None:
    values = run_json(validation=None)
    values["rounds"] = values["rounds"][:5]
    (waiting,) = [run_from_json({**values, "rounds": [], "ended": False}, source="s")]
    assert waiting.notices == ("no round is closed yet",)
    (cut,) = [run_from_json(values, source="s")]
    assert cut.notices == ("it isn't finished: 58 of 100 steps",)
    (running,) = [run_from_json({**values, "ended": False}, source="s")]
    assert running.notices == ("it had not ended when this was recorded: 58 of 100 steps",)
    for known, words in ((True, "it still runs"), (False, "it has not ended, and no replica shows life: interrupted")):
        one = run_from_json({**values, "ended": False}, source="s", running=known)
        assert one.notices == (f"{words}: 58 of 100 steps",)
    assert run_from_json({**values, "ended": False}, source="s", live=True).notices == ()


def test_rounds_that_are_missing_doubled_or_broken() -> None:
    values = run_json()
    rounds = values["rounds"]
    values["rounds"] = [rounds[1], {**rounds[4], "steps": "many"}, *rounds[5:], {**rounds[1], "loss": 9.0}, None]
    run = run_from_json(values, source="s")
    assert [one.round for one in run.rounds] == [1, 5, 6, 7]
    assert run.notices == (
        "2 rounds aren't readable, and left out",
        "the rounds before round 1 are missing",
        "3 rounds, from round 2 on, are missing",
    )


def test_the_record_of_a_last_round_that_nobody_went_on_from_is_not_assessed() -> None:
    values = run_json()
    values["rounds"][-1]["observation"] = None
    values["rounds"][-2]["observation"] = {"drift": 1.0}
    rounds = run_from_json(values, source="s").rounds
    assert (rounds[-1].assessment, rounds[-1].action) == ("", "")
    assert (rounds[-2].assessment, rounds[-2].action) == ("supporting", "grow")


def test_seeds_that_differ_and_runs_that_are_given_twice() -> None:
    runs = [run_json(seed=1), run_json(seed=2), run_json("fixed", seed=1), run_json(seed=2)]
    found, said = group_runs([run_from_json(one, source=f"file {i}") for i, one in enumerate(runs)])
    assert [len(group.runs) for group in found] == [2, 1]
    assert said == [
        "file 3: the same run as in file 1, shown once",
        "the seeds differ (AutoLoCo: 1, 2; Fixed interval of 10: 1): some of the difference between them may be the "
        "seeds'",
    ]


def test_labels_say_what_differs() -> None:
    runs = [run_json(), run_json(codec="float32"), run_json("fixed")]
    found, _ = group_runs([run_from_json(one, source="s") for one in runs])
    assert [group.label for group in found] == ["AutoLoCo, int8", "AutoLoCo, float32", "Fixed interval of 10"]


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["autoloco", "ddp"])
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_damage_of_a_run_keeps_the_page_from_being_made(data: st.DataObject) -> None:
    values: dict[str, Any] = run_json()
    for name in data.draw(st.lists(st.sampled_from(sorted(values)), max_size=4)):
        values[name] = data.draw(ANYTHING)
    if isinstance(values["rounds"], list) and values["rounds"] and isinstance(values["rounds"][0], dict):
        for one in data.draw(st.lists(st.sampled_from(values["rounds"]), max_size=3)):
            for name in data.draw(st.lists(st.sampled_from(sorted(round_json(0, 1, 1, 1.0))), max_size=4)):
                one[name] = data.draw(ANYTHING)
    json.dumps(payload([run_from_json(values, source="s")]), allow_nan=False)


def test_text_of_a_run_is_no_markup() -> None:
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    values = run_json(name=bad, policy=bad, codec=bad, versions={bad: bad})
    values["rounds"][0] |= {
        "absent": {"1": bad},
        "outliers": {"0": bad},
        "assessment": bad,
        "action": bad,
        "phase": bad,
    }
    html = page(payload([run_from_json(values, source=bad)], notices=[bad]))
    mine = html[html.index('id="values"') :]
    mine = mine[: mine.index("</script>")]
    assert "alert(1)" in mine and "<" not in mine.partition(">")[2]


def test_a_round_that_averaged_nobody_has_no_members() -> None:
    told = {"0": {"loss": 1.0}, "1": {"loss": 3.0}}
    (nobody, unsaid), _ = tidy_rounds(
        [
            {"round": 0, "steps": 5, "members": [], "replicas": told},
            {"round": 1, "steps": 5, "replicas": told},
        ]
    )
    assert (nobody.members, nobody.loss) == ((), None) and (unsaid.members, unsaid.loss) == ((0, 1), 2.0)
