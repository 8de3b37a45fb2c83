"""What a RunPod pod runs: the job's container, after which the pod deletes itself.

Invariant: whatever the job comes to, the pod asks to be deleted, because the service would start its container again
and go on charging. The service gives each pod its id and a key of its own. If that fails, the container that is started
again returns at once (`--once`), and a launcher that looks deletes the pod.
"""

from __future__ import annotations

import os
import sys

from composer_replication.diloco.serverless.backends.runpod import TERMINATE, ask
from composer_replication.diloco.serverless.jobs import container
from composer_replication.diloco.serverless.jobs.encoded import decoded
from composer_replication.errors import ReplicationError

__all__ = ["main"]


def main() -> int:
    code = 1
    try:
        code = container.main(["--once", *decoded(sys.argv[1:])])
    finally:
        try:
            ask(TERMINATE, {"input": {"podId": os.environ.get("RUNPOD_POD_ID", "")}})
        except ReplicationError as error:
            print(f"the pod couldn't delete itself: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
