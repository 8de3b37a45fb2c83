"""Commands around a store: their options and help. What they do is in the modules of their names.

Invariant: nothing here loads torch or a client; that happens when a command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

__all__ = ["add_tools", "run_tool"]

_EXPORT = """\
examples:
  composer-replication export s3://bucket/runs/one -o model.safetensors
  composer-replication export runs/quickstart -o model.pt --round 20
  composer-replication export runs/c4-215m-autoloco -o llama/ --recipe runs/c4-215m-autoloco/recipe.yaml

The newest checkpoint in the store, or that of --round: the weights that the whole fleet shared at the start of that
round, under the model's own names and in its dtypes, tied tensors under each of their names. Every chunk is checked
against its hash and the whole against the digest that the fleet agreed on; nothing is written unless both hold.
Writing .safetensors needs composer-replication[safetensors]; a name that ends in .pt or .pth gives a state dict.

Frozen parameters are never sent, so they aren't in the store: load with strict=False over your base model.

exit code: 0 written, 2 nothing was written, with the reason.
"""

_GC = """\
examples:
  composer-replication gc s3://bucket/runs/one
  composer-replication gc s3://bucket/runs/one --delete
  composer-replication gc s3://bucket/runs/one --only-final --delete

Shows what of a run nobody can need any more, and deletes it with --delete. Running fleets tidy up behind themselves;
this is for what killed ones have left, and for finished runs. Only blobs (contributions, means, contents of
checkpoints) ever go, of this one run; the small objects that say what was decided stay.

Of a run that isn't finished: rounds before the safe window, which is the newest checkpoint, or the last round that all
expected replicas took part in if that is earlier, less 2 rounds; and contents of checkpoints before the two newest. Of
a finished one: all rounds before its newest checkpoint. --before never reaches beyond that.

exit code: 0 shown, or deleted; 2 refused, with the reason.
"""

_DOCTOR = """\
examples:
  composer-replication doctor s3://bucket/runs
  composer-replication doctor file:///shared --parameters 1.3B --replicas 8 --codec int8
  composer-replication doctor hf://buckets/me/runs --blobs

Tries what a round rests on, with objects below a prefix of its own that it deletes: one winner among several writers
of one key; what is written is found at once, whole or not at all; ranges; the store's clock; latency; and speed up and
down at several sizes. Each line says what it means for a run. With --parameters also how long a round will take.

--blobs: the store shall hold only a run's blobs and a second one (control=) the rest, so that it needn't create an
object only once. Run it where the replicas will run: speed is that of this machine's link.

exit code: 0 fit for a run, 1 not, 2 the store can't be used (and why) or wrong arguments.
"""

_POLICY = """\
examples:
  composer-replication policy s3://bucket/runs/one > policy.json
  composer-replication policy s3://bucket/runs/one --kms-key arn:aws:kms:eu-west-1:123456789012:key/1234
  composer-replication policy gs://bucket/runs/one --member serviceAccount:train@project.iam.gserviceaccount.com
  composer-replication policy az://container/runs/one --account /subscriptions/... --principal OBJECT-ID

Prints what the replicas of one run need, and no more: to read, write, delete and list below its prefix. Nothing is
asked of any cloud. s3: an IAM policy for a user, a role or a session. gs: a managed folder with its binding, a binding
with a condition, the boundary of a downscoped token. az: a role assignment with a condition, parameters of a SAS.
"""

Command = Callable[[str, str, str], argparse.ArgumentParser]


def _place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("uri", metavar="URI", help="the run's store, or the folder of a run on this machine")
    parser.add_argument("--control", metavar="URI", help="the run's second store, if it has one (docs/stores.md)")
    parser.add_argument("--signing-key-file", metavar="FILE", help="the run's key, if it is signed (docs/security.md)")


def add_tools(command: Command) -> None:
    """Add the commands to the parser; `command(name, summary, epilog)` makes one."""
    doctor = command("doctor", "try what a store really does, and how fast", _DOCTOR)
    doctor.add_argument("uri", metavar="URI", help="a store, or a folder")
    doctor.add_argument(
        "--parameters", metavar="COUNT", help="of a model, e.g. 1.3B: adds the expected time of a round"
    )
    doctor.add_argument("--replicas", type=int, default=4, metavar="N", help="for that (default 4)")
    codecs = ("float32", "bfloat16", "int8")
    doctor.add_argument("--codec", default="float32", choices=codecs, help="for that (default float32)")
    doctor.add_argument("--largest", metavar="SIZE", help="of the objects written (default 34MB)")
    doctor.add_argument("--blobs", action="store_true", help="try it as a store for blobs only")
    doctor.add_argument("--json", action="store_true", help="for programs: one JSON object")

    policy = command("policy", "print least-privilege access for one run's prefix", _POLICY)
    policy.add_argument("uri", metavar="URI", help="the run's own prefix: s3://, gs:// or az://")
    partitions = ("aws", "aws-cn", "aws-us-gov")
    policy.add_argument("--read-only", action="store_true", help="for status and export")
    policy.add_argument("--partition", default="aws", choices=partitions, help="s3: which of Amazon's (default aws)")
    policy.add_argument("--kms-key", metavar="ARN", help="s3: the key of a bucket that is encrypted with one")
    policy.add_argument(
        "--member", action="append", default=[], help="gs: who, e.g. serviceAccount:...; again for more"
    )
    policy.add_argument("--account", metavar="ID", help="az: resource id of the storage account")
    policy.add_argument("--principal", metavar="ID", help="az: object id of who trains")
    policy.add_argument("--json", action="store_true", help="gs, az: all of it as one JSON object")

    gc = command("gc", "show, or delete, what of a run nobody can need any more", _GC)
    _place(gc)
    gc.add_argument("--delete", action="store_true", help="delete it (without this: a dry run)")
    gc.add_argument("--before", type=int, metavar="ROUND", help="blobs of rounds before this one only")
    gc.add_argument("--only-final", action="store_true", help="of a finished run: keep its newest checkpoint only")
    gc.add_argument("--list", action="store_true", help="name every object that may go")
    gc.add_argument("--json", action="store_true", help="for programs: one JSON object")

    export = command("export", "write a run's shared weights to a file", _EXPORT)
    _place(export)
    export.add_argument("-o", "--output", required=True, metavar="FILE", help="ends in .safetensors, .pt or .pth")
    export.add_argument("--recipe", help="the run's: write a folder of Transformers', config and tokenizer included")
    export.add_argument("--round", type=int, metavar="N", help="the checkpoint of that round (default: the newest)")
    export.add_argument("--float32", action="store_true", help="as the fleet keeps them, not in the model's dtypes")
    export.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    export.add_argument("--json", action="store_true", help="for programs: one JSON object")


def run_tool(args: argparse.Namespace) -> int | None:
    """Run the command that `args` name; gives its exit code, or None if it isn't one of these."""
    if args.command == "doctor":
        from composer_replication.cli.doctor import doctor

        return doctor(
            args.uri,
            parameters=args.parameters,
            replicas=args.replicas,
            codec=args.codec,
            largest=args.largest,
            blobs_only=args.blobs,
            as_json=args.json,
        )
    if args.command == "policy":
        from composer_replication.cli.policy import policy

        return policy(
            args.uri,
            partition=args.partition,
            kms_key=args.kms_key,
            members=args.member,
            account=args.account,
            principal=args.principal,
            read_only=args.read_only,
            as_json=args.json,
        )
    if args.command == "export":
        from composer_replication.cli.export import export

        return export(
            args.uri,
            args.output,
            control=args.control,
            signing_key_file=args.signing_key_file,
            round=args.round,
            wide=args.float32,
            overwrite=args.overwrite,
            as_json=args.json,
            recipe=args.recipe,
        )
    if args.command == "gc":
        from composer_replication.cli.gc import gc

        return gc(
            args.uri,
            control=args.control,
            signing_key_file=args.signing_key_file,
            delete=args.delete,
            before=args.before,
            only_final=args.only_final,
            listed=args.list,
            as_json=args.json,
        )
    return None
