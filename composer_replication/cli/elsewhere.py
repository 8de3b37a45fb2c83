"""Commands around fleets that run elsewhere: their options and help. What they do is in `jobs.py` and `plan.py`.

Invariant: nothing here loads torch or a client; that happens when a command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

__all__ = ["add_job_commands", "run_job_command"]

_PLAN = """\
examples:
  composer-replication plan recipe.yaml executor=modal executor.options.gpu=H100 store.uri=s3://bucket/runs/one
  composer-replication plan recipe.yaml --parameters 7B --bandwidth 500 --step-seconds 2.5
  composer-replication plan recipe.yaml --prices mine.yaml --node sagemaker/ml.p5.48xlarge --json
  composer-replication plan recipe.yaml --policy

What a launch would come to. For each place: its limits, the jobs' names, what each replica will run, which credentials
are needed (by name) and whether they are set, and what the service would refuse, which it is asked. For all: bytes and
seconds of a round, rounds, costs. Nothing is started.

A round's seconds are those of a link of --bandwidth each way between every replica and the store, everyone ready at
once; 'doctor' measures a real one. Prices are on-demand list prices of the day that is shown, of hardware only: traffic
and storage come on top. --prices FILE (YAML or JSON, 'modal: {H100: 3.5}', dollars an hour) goes over them, by back end
and by its option's value: modal gpu, hf_jobs flavor, sagemaker and azure_ml instance_type, vertex machine_type, runpod
gpu_type; '*' for whatever else.

The break-even against one machine with at least as many GPUs of the kind: a fleet that spends the share s of its time
on exchanging trains for 1 - s of each hour that it pays. With prices f and n of a GPU-hour it is the cheaper way while
f / (1 - s) < n, which is s < 1 - f / n. With R seconds for a round and h steps between two rounds, s is R / (R + h t),
so that every step's time t above R (1 / (1 - f / n) - 1) / h will do. It takes a step to be as fast on both, and says
nothing of what else differs: preemptions, idle GPUs of the node, whether the node can be had at all.

exit code: 0 planned, 2 a service would refuse it, or a wrong recipe.
"""

_LOGS = """\
examples:
  composer-replication logs s3://bucket/runs/one --replica 0 --follow
  composer-replication logs s3://bucket/runs/one --replica 0 --after 1200
  composer-replication logs s3://bucket/runs/one

What replicas print that run as jobs of a service, from any machine: the store says which jobs they are and how the
service is reached, its client and credentials are this machine's. Output is a replica's from its newest job's first
line on; it goes on into the job that follows, if the replica is started again. Without --replica that of all of them,
each line with its replica's number. Without --follow what there is now, and how many lines it was, for --after.

Replicas on the launcher's own machine write replica-N/log.txt in the run's folder.
"""

_CANCEL = """\
examples:
  composer-replication cancel s3://bucket/runs/one
  composer-replication cancel s3://bucket/runs/one --replica 2

Asks the services to stop the run's jobs, from any machine that can read the store and has the services' credentials.
What is cancelled isn't started again, by whatever launcher. Jobs that have ended already stay as they are. Under
failure_policy: strict the others can't go on without a replica that is cancelled; a launcher that looks on stops them.
'composer-replication status URI --jobs' shows when they have ended, and launch --resume goes on from there.

exit code: 0 asked (or nothing ran), 2 a service or the store could not be asked, with the reason.
"""

Command = Callable[[str, str, str], argparse.ArgumentParser]
_URI = "the run's store, or the folder of a run on this machine"


def add_job_commands(command: Command) -> None:
    """Add the commands to the parser; `command(name, summary, epilog)` makes one."""
    plan = command("plan", "show what a launch would come to, and start nothing", _PLAN)
    plan.add_argument("recipe", metavar="RECIPE", help="a YAML file")
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="put over the recipe")
    plan.add_argument("--parameters", metavar="COUNT", help="of the model, e.g. 1.3B (built-in models are counted)")
    bandwidth = "of each replica's link to the store, both ways (default 1000)"
    plan.add_argument("--bandwidth", type=float, default=1000.0, metavar="MBIT", help=bandwidth)
    plan.add_argument("--step-seconds", type=float, metavar="T", help="of an optimizer step on one replica")
    plan.add_argument("--prices", metavar="FILE", help="your prices, put over the table")
    plan.add_argument(
        "--node", metavar="NAME", help="to compare with, e.g. vertex/a3-highgpu-8g (default: the cheapest)"
    )
    plan.add_argument("--policy", action="store_true", help="print what the replicas' identity must be allowed")
    plan.add_argument("--json", action="store_true", help="for programs: one JSON object")

    logs = command("logs", "show what replicas print that run elsewhere", _LOGS)
    logs.add_argument("uri", metavar="URI", help=_URI)
    logs.add_argument("--replica", type=int, metavar="N", help="of this one only")
    logs.add_argument("--after", type=int, default=0, metavar="N", help="pass over the first N lines")
    logs.add_argument("--follow", action="store_true", help="go on until the replicas have ended, or Ctrl-C")

    cancel = command("cancel", "stop replicas that run elsewhere", _CANCEL)
    cancel.add_argument("uri", metavar="URI", help=_URI)
    cancel.add_argument("--replica", type=int, metavar="N", help="this one only")


def run_job_command(args: argparse.Namespace) -> int | None:
    """Run the command that `args` name; gives its exit code, or None if it isn't one of these."""
    if args.command == "plan":
        from composer_replication.cli.plan import plan

        return plan(
            args.recipe,
            args.overrides,
            prices=args.prices,
            policy=args.policy,
            bandwidth=args.bandwidth,
            parameters=args.parameters,
            step_seconds=args.step_seconds,
            node=args.node,
            as_json=args.json,
        )
    if args.command == "logs":
        from composer_replication.cli.jobs import logs

        return logs(args.uri, replica=args.replica, after=args.after, follow=args.follow)
    if args.command == "cancel":
        from composer_replication.cli.jobs import cancel

        return cancel(args.uri, replica=args.replica)
    return None
