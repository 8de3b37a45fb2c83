"""What `launch --resume` does before it starts the replicas: nothing where they can go on, and else a new epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import filelock
import pytest

from composer_replication.cli import main
from composer_replication.cli.places import alone_in, refuse_used_stores, resumed
from composer_replication.cli.resume import prepare_resume
from composer_replication.cli.view import RunReader
from composer_replication.collective.object_store.epochs import read_epochs
from composer_replication.diloco.serverless.jobs.marks import Mark, Marks
from composer_replication.errors import ObjectCorrupt, RecipeError, ReplicaTaken
from composer_replication.recipe import recipe_from, to_yaml
from composer_replication.store import LocalStore, MemoryStore
from tests.collective.object_store.helpers import join
from tests.collective.object_store.test_epochs import Fleet, killed, resume
from tests.collective.object_store.toy import Toy, run_toy
from tests.support.threads import run_threads


def own_checkpoints(folder: Path, rounds: dict[int, list[int]]) -> None:
    for replica, which in rounds.items():
        place = folder / f"replica-{replica}" / "checkpoints" / f"replica-{replica}"
        place.mkdir(parents=True, exist_ok=True)
        for round in which:
            (place / f"round-{round:06d}-step-{10 * round:09d}.ckpt").write_bytes(b"")


@pytest.fixture
def run(tmp_path: Path) -> tuple[MemoryStore, Path]:
    """Killed in round 7, after checkpoint 6."""
    store, records = MemoryStore(), tmp_path / "records"
    records.mkdir()
    killed(store, records, 2, 7)
    own_checkpoints(tmp_path, {0: [6, 7], 1: [6, 7]})
    return store, tmp_path


def lose(store: MemoryStore, round: int) -> None:
    store.delete([key for key in store.list(f"rounds/{round:08d}/") if "/in/" in key or "/out/" in key])


def test_a_fleet_that_can_go_on_does(run: tuple[MemoryStore, Path]) -> None:
    store, folder = run
    assert prepare_resume(store, folder, 2) == "" and read_epochs(store) == ()
    own_checkpoints(folder, {0: [], 1: []})
    assert prepare_resume(store, folder / "another", 2) == "", "the store has all that is needed"


def test_another_number_of_replicas(run: tuple[MemoryStore, Path]) -> None:
    store, folder = run
    assert prepare_resume(store, folder, 5) == "resumed from round 7 as epoch 1: 5 replicas instead of 2"
    assert prepare_resume(store, folder, 5) == "", "it has begun"
    assert (
        sorted(path.name for path in folder.rglob("*.ckpt"))
        == ["round-000006-step-000000060.ckpt"] * 2 + ["round-000007-step-000000070.ckpt"] * 2
    )


def test_rounds_that_are_lost(run: tuple[MemoryStore, Path]) -> None:
    store, folder = run
    lose(store, 6)
    assert prepare_resume(store, folder, 2) == "", "every replica is past them by itself"
    assert prepare_resume(store, folder / "another", 2) == "resumed from round 6 as epoch 1: 2 replicas", (
        "nobody has anything of its own"
    )


def test_checkpoints_of_rounds_that_are_given_up_are_set_aside(run: tuple[MemoryStore, Path]) -> None:
    store, folder = run
    lose(store, 6)
    assert prepare_resume(store, folder, 3) == (
        "resumed from round 6 as epoch 1: 3 replicas instead of 2; 2 checkpoints of later rounds, which the store "
        "can't give any more, are set aside"
    )
    left = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.ckpt"))
    assert left == [
        f"replica-{replica}/checkpoints/replica-{replica}/{name}"
        for replica in (0, 1)
        for name in ("before-epoch-1/round-000007-step-000000070.ckpt", "round-000006-step-000000060.ckpt")
    ]


def test_no_checkpoint_in_the_store(run: tuple[MemoryStore, Path]) -> None:
    store, folder = run
    store.delete([key for key in store.list("checkpoints/") if not key.endswith(".json")])
    assert prepare_resume(store, folder, 2) == "", "each has its own"
    with pytest.raises(ObjectCorrupt, match="no checkpoint that is whole"):
        prepare_resume(store, folder, 3)


def test_nothing_to_prepare(tmp_path: Path) -> None:
    assert prepare_resume(MemoryStore(), tmp_path, 2) == ""
    store = MemoryStore()
    run_threads([lambda r=r: run_toy(Toy.fresh(r), join(store, r, 2), 2) for r in range(2)])
    assert prepare_resume(store, tmp_path, 3) == "" and read_epochs(store) == ()


def test_a_run_that_is_being_trained(tmp_path: Path) -> None:
    with Fleet(2) as two:
        two.round(0, {0: 1.0, 1: 1.0})
        with pytest.raises(ReplicaTaken, match="is being trained"):
            prepare_resume(two.store, tmp_path, 3)


def test_the_reader_follows_a_run_into_its_next_epoch(tmp_path: Path) -> None:
    store = MemoryStore()
    killed(store, tmp_path, 2, 8)
    lose(store, 6)
    for record in tmp_path.iterdir():
        record.unlink()
    reader = RunReader(store)
    reader.refresh()
    assert [len(closed.members) for closed in reader.rounds] == [2] * 8 and reader.ids == (0, 1)
    prepare_resume(store, tmp_path, 3)
    reader.refresh()
    resume(store, tmp_path, 3, 9)
    reader.refresh()
    assert [len(closed.members) for closed in reader.rounds] == [2] * 6 + [3] * 3
    assert reader.ids == (0, 1, 2) and reader.ended
    again = RunReader(store)
    again.refresh()
    assert again.rounds == reader.rounds


def made(**values: Any) -> Any:
    return recipe_from(
        '{"name": "x", "model": {"name": "byte_gpt"}, "data": {"name": "text_bytes"}}',
        [f"{key.replace('__', '.')}={value}" for key, value in values.items()],
    )


def test_on_another_machine_the_store_is_all_there_is(tmp_path: Path) -> None:
    folder, uri = tmp_path / "run", (tmp_path / "store").as_uri()
    recipe = made(output=str(folder), store__uri=uri)
    store = LocalStore(tmp_path / "store")
    with pytest.raises(RecipeError, match="no run in .*, nor in file://"):
        resumed(recipe, store)
    store.put("fleet.json", b"{}")
    assert resumed(recipe, store).output == str(folder) and folder.is_dir()
    # The launcher's handles may be lost: replicas tell of themselves.
    elsewhere = made(output=str(tmp_path / "elsewhere"), store__uri=(tmp_path / "jobs").as_uri())
    jobs = LocalStore(tmp_path / "jobs")
    refuse_used_stores(elsewhere.store)
    Marks(jobs).mark(Mark("run-0-r0-0", 0))
    assert resumed(elsewhere, jobs).output == str(tmp_path / "elsewhere")
    with pytest.raises(RecipeError, match="there is a launch in .*--resume"):
        refuse_used_stores(elsewhere.store)
    with pytest.raises(RecipeError, match=r"no run in .*other; launch the recipe.yaml"):
        resumed(made(output=str(tmp_path / "other")), None)


def test_a_refused_resume_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("name: x\nmodel: {name: byte_gpt}\ndata: {name: text_bytes}\n")
    for values, words in (
        ([f"output={tmp_path}/run", f"store.uri={tmp_path}/store"], "store isn't there: check the path"),
        ([f"output={tmp_path}/run"], "no run in"),
        ([f"output={tmp_path}"], "store isn't there"),  # a folder that holds a recipe, but has run nothing
    ):
        assert main(["launch", str(file), "--resume", *values]) == 2
        assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_one_launcher_at_a_time_looks_after_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = made(output=str(tmp_path), store__uri=(tmp_path / "store").as_uri())
    LocalStore(tmp_path / "store").put("fleet.json", b"{}")
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    with alone_in(tmp_path):
        assert main(["launch", str(tmp_path / "recipe.yaml"), "--resume"]) == 2
        assert "another launcher looks after the run in" in capsys.readouterr().err
        assert sorted(path.name for path in tmp_path.iterdir()) == [".launcher.lock", "recipe.yaml", "store"]
    with alone_in(tmp_path):
        pass  # it has ended, and left nothing that would keep others out


def test_a_folder_that_can_t_be_locked_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, **_: Any) -> None:
        raise NotImplementedError("no locks here")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with alone_in(tmp_path), alone_in(tmp_path):
        pass
