"""Following an output that a service keeps somewhere and hands over a little late.

Invariant: a job's output is over when its container's own last line has come, or, if it was killed before that, when
nothing has come for some looks after the service said that the job had ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

__all__ = ["tail"]

_QUIET_LOOKS = 5


def tail(
    job_name: str,
    new_lines: Callable[[], Iterable[str]],
    ended: Callable[[], bool],
    pause: Callable[[], None],
) -> Iterator[str]:
    """Lines as they come. `new_lines` gives those that are new, `ended` says whether the job is over, `pause` waits."""
    quiet, last = 0, ""
    while True:
        over = ended()  # asked before reading: what came before the end is read after it
        quiet += 1
        for line in new_lines():
            quiet, last = 0, line
            yield line
        last_word = last.startswith(f"job {job_name}: ") and not last.startswith(f"job {job_name}: replica ")
        if over and (last_word or quiet > _QUIET_LOOKS):
            return
        pause()
