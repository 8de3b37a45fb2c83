"""One replica on Modal, one on Hugging Face Jobs, one bucket: two rounds of a model of half a billion.

python spikes/009-c-mixed/run.py --stand-in                                   (no account; a small model; two minutes)
python spikes/009-c-mixed/run.py s3://BUCKET/009-c s3://BUCKET/text --image REGISTRY/IMAGE:TAG    (see README.md)
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import small_model  # noqa: F401  # puts the repository on the path
from services import stand_ins, tell

from composer_replication.diloco.serverless import HFJobsExecutor, ModalExecutor, ReplicaSpec

MODEL = "Qwen/Qwen2.5-0.5B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rendezvous_uri", nargs="?", help="a prefix that nothing else uses")
    parser.add_argument("data_uri", nargs="?", help="text to train on")
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--sync-every", type=int, default=50)
    parser.add_argument("--outer-rounds", type=int, default=2)
    parser.add_argument("--image", help="with this package, on a registry that both can read")
    parser.add_argument("--secrets", nargs="*", default=["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
    options = parser.parse_args()
    if not options.stand_in and not (options.data_uri and options.image):
        parser.error("give the rendezvous, the text and --image, or --stand-in")
    with contextlib.ExitStack() as stack:
        uri, secrets, image = options.rendezvous_uri, options.secrets, options.image
        if options.stand_in:
            uri, secrets, image = stack.enter_context(stand_ins(MODEL)), [], "registry/image:1"
        specs = [
            ReplicaSpec(
                replica_id=i,
                num_replicas=2,
                rendezvous_uri=uri,
                model_id=MODEL,
                inner_optimizer={"name": "AdamW", "lr": 4e-4},
                sync_every=options.sync_every,
                outer_rounds=options.outer_rounds,
                extra_env={"DATA_URI": options.data_uri} if options.data_uri else None,
                overrides=("codec=int8",),
            )
            for i in range(2)
        ]
        settings = {"time_limit_hours": 1, "secrets": secrets, "image": image}
        groups = [
            (ModalExecutor(gpu="A100-40GB", **settings), specs[:1]),
            (HFJobsExecutor(flavor="a100-large", **settings), specs[1:]),
        ]
        began = time.monotonic()
        launched = [(executor, executor.launch_replicas(own)) for executor, own in groups]
        try:
            results = [result for executor, handles in launched for result in executor.collect(handles, timeout=3600)]
        finally:
            for executor, handles in launched:
                executor.cancel(executor.poll(handles))
        tell(results, time.monotonic() - began)


if __name__ == "__main__":
    main()
