"""When the output of a job is over, for services that hand it over late."""

from __future__ import annotations

from composer_replication.diloco.serverless.backends.tail import tail

FIRST, LAST = "job a-r0-0: replica 0 of 1 on host", "job a-r0-0: completed"


def told(looks: list[list[str]], ended_from: int) -> tuple[list[str], int]:
    """(lines, looks taken) for a job that has ended by look number `ended_from`."""
    taken = 0

    def new_lines() -> list[str]:
        nonlocal taken
        taken += 1
        return looks[taken - 1] if taken <= len(looks) else []

    return list(tail("a-r0-0", new_lines, lambda: taken >= ended_from, lambda: None)), taken


def test_the_containers_last_word_ends_it_at_once() -> None:
    assert told([[FIRST, "one"], ["two", LAST]], 0) == ([FIRST, "one", "two", LAST], 2)


def test_lines_that_come_after_the_end_are_read() -> None:
    looks = [[FIRST], [], [], ["late"], [], [LAST]]
    assert told(looks, 1) == ([FIRST, "late", LAST], 6)


def test_a_killed_containers_output_is_over_when_nothing_comes_any_more() -> None:
    assert told([[FIRST], ["one"]], 0) == ([FIRST, "one"], 8)


def test_as_long_as_it_runs_silence_is_no_end() -> None:
    assert told([[FIRST], *[[]] * 20, ["one"], [LAST]], 22) == ([FIRST, "one", LAST], 23)


def test_another_jobs_last_word_is_not_its_own() -> None:
    assert told([["job a-r0-1: completed"], ["more"], [LAST]], 0)[0] == ["job a-r0-1: completed", "more", LAST]
