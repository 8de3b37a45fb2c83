"""How a replica's process ends, so that whoever started it knows whether to start it again.

Invariant: a number means one thing for every launcher. A process killed by a signal has the signal's negative number
(as `subprocess` says it), 128 plus it (as shells and containers do) or 256 minus it (as a launcher in Python does that
passes the first on).
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Exit", "again", "describe", "killed"]


class Exit(IntEnum):
    COMPLETED = 0
    ERROR = 1  # an exception in Python: most often the model's or the data's
    USAGE = 2  # wrong command line
    SETTINGS = 3  # a recipe, setting or fleet that doesn't fit: starting again would end alike
    FENCED = 4  # a newer process has taken this replica over
    ABORTED = 5  # strict policy: the round was given up because replicas were missing
    DIVERGED = 6  # this replica's state isn't the fleet's
    STORE = 7  # the store failed or can't be reached
    TAKEN = 8  # a live process holds this replica's id, or trains the run
    PREEMPTED = 75  # asked to stop; a checkpoint is on the disk


_WORDS = {
    Exit.COMPLETED: "completed",
    Exit.ERROR: "an exception in its code",
    Exit.USAGE: "wrong arguments",
    Exit.SETTINGS: "settings that don't fit",
    Exit.FENCED: "a newer process has taken its place",
    Exit.ABORTED: "the round was aborted because replicas were missing",
    Exit.DIVERGED: "its state isn't the fleet's",
    Exit.STORE: "the store failed",
    Exit.TAKEN: "a live process has its place already",
    Exit.PREEMPTED: "it was asked to stop",
}


def killed(code: int) -> int | None:
    """The signal's number if a signal ended the process, else None."""
    if code < 0:
        return -code
    if 128 < code < 128 + 65:
        return code - 128
    # Not 255: too many programs end with -1 for reasons of their own.
    return 256 - code if 192 < code < 255 else None


def again(code: int) -> str:
    """What a start after this end would count as: "preemption" (the machine's, the store's or the back end's doing),
    "error" (the user's own code), or "" if it would end alike."""
    if killed(code) is not None or code in (Exit.PREEMPTED, Exit.STORE):
        return "preemption"
    return "error" if code == Exit.ERROR else ""


def describe(code: int) -> str:
    """In words, for messages."""
    signal = killed(code)
    if signal is not None:
        return f"killed by signal {signal}"
    try:
        return _WORDS[Exit(code)]
    except ValueError:
        return f"exit code {code}"
