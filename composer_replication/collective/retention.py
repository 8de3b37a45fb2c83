"""How long a round's blobs are kept, and how often a replica must save itself to be able to go on from there.

Invariant: pure; a replica whose two numbers pass `check_own_checkpoints` never finds its newest own checkpoint older
than the rounds that are kept, as long as it is expected.
"""

from __future__ import annotations

from math import gcd

__all__ = ["CHECKPOINT_EVERY", "KEEP_ROUNDS", "check_own_checkpoints"]

KEEP_ROUNDS = 2  # before the newest checkpoint of the fleet
CHECKPOINT_EVERY = 10  # rounds between two of these, unless another number is given


def check_own_checkpoints(own: int, shared: int, *, own_name: str, shared_name: str) -> None:
    """Raise ValueError if a replica that saves itself every `own` rounds may be older than what is kept, in a fleet
    that writes a checkpoint every `shared` rounds.

    At a multiple of `shared` it was saved up to own - gcd(own, shared) rounds before.
    """
    if own - gcd(own, shared) > KEEP_ROUNDS:
        least = min(n for n in range(shared, 2 * shared + own + 1) if n % own == 0)
        raise ValueError(
            f"{own_name}={own} doesn't go with {shared_name}={shared}: a replica that is restarted may then be older "
            f"than the rounds that are kept for it, and can't go on. Give {own_name} a number that divides {shared}, "
            f"or {shared_name} a multiple of {own}, such as {least}"
        )
