"""The command `composer-replication`.

Invariant: parsing and `--help` load neither torch nor a trainer; a command imports what it needs when it runs. Mistakes
of the user end as one sentence and an exit code, never as a traceback.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from composer_replication import __version__
from composer_replication.cli.elsewhere import add_job_commands, run_job_command
from composer_replication.cli.report_options import add_report
from composer_replication.cli.schedule_options import add_schedule
from composer_replication.cli.simulate_options import add_simulate
from composer_replication.cli.tools import add_tools, run_tool
from composer_replication.errors import ReplicationError

__all__ = ["main"]

_TOP = """\
commands, in the order in which you may want them:

  composer-replication schedule --steps 50000 --base 500 --warmup 1000
      how many rounds would the adaptive interval take? (73)
  composer-replication launch recipes/quickstart.yaml
      train on this machine, one process for each replica, with a live table
  composer-replication launch recipes/quickstart.yaml --dry-run
      check everything, read the first batches, show the recipe with its defaults filled in, start nothing
  composer-replication simulate recipes/quickstart.yaml --replicas 8 --seeds 1 2 3
      the same training in one process, over several seeds, with nothing to start
  composer-replication plan recipe.yaml executor=hf_jobs store.uri=s3://bucket/runs/one
      elsewhere: limits, credentials, seconds of a round, costs; starts nothing
  composer-replication launch recipe.yaml executor=hf_jobs store.uri=s3://bucket/runs/one --detach
      train as jobs of a service; 'logs' and 'cancel' reach them from any machine
  composer-replication status file:///shared/run1 --watch
      watch a run through its store, from anywhere that can read it
  composer-replication report runs/quickstart -o report.html
      a page with charts: what was saved, at what loss, where time was lost
  composer-replication doctor s3://bucket/runs --parameters 1.3B --replicas 8 --codec int8
      can this store hold a run, and how long will a round take?
  composer-replication policy s3://bucket/runs/one
      least-privilege access for that prefix
  composer-replication gc file:///shared/run1
      what of a run nobody can need any more (a dry run; --delete deletes it)
  composer-replication export file:///shared/run1 -o model.safetensors
      the shared weights, verified, under the model's own names

'composer-replication COMMAND --help' tells the rest. Recipes are described in docs/recipes.md.
"""

_LAUNCH = """\
examples:
  composer-replication launch recipes/quickstart.yaml
  composer-replication launch recipes/quickstart.yaml training.steps=200 fleet.replicas=2
  composer-replication launch recipes/quickstart.yaml autoloco.policy=fixed output=runs/fixed
  composer-replication launch runs/quickstart/recipe.yaml --resume
  composer-replication launch runs/quickstart/recipe.yaml --resume fleet.replicas=4
  composer-replication launch recipe.yaml executor=hf_jobs executor.options.flavor=a10g-small \\
      executor.options.image=me/train:1 store.uri=s3://bucket/runs/one --detach

Each launch has a folder of its own: output, or output-2, output-3, ... It holds recipe.yaml (all defaults filled in),
the store (unless store.uri says otherwise), and for each replica log.txt, checkpoints and result.json; at the end
also summary.json and training.png. Ctrl-C stops the replicas in order; --resume goes on from there.

executor=NAME runs them elsewhere (docs/launchers.md): modal, hf_jobs, sagemaker, vertex, azure_ml, volcano, kuberay,
runpod; fleet.groups spreads one fleet over several. Everything is checked with each service before the first job is
sent. --dry-run prints the requests, secrets masked. While 'launch' runs it starts replicas again whose machine was
taken; with --detach, or after it died, 'launch ... --resume' finds the jobs, starts none twice, and goes on with that.
Ctrl-C stops the jobs, too.

--dry-run also reads built-in data as far as a first batch for training and for validation take, where the replicas run
on this machine and the files aren't on the Hub, and says what it read, or why it didn't.

The table's last column: a replica is finished when it has trained its last step and holds the final weights (it may
still validate), and completed when its process has ended too. Where the table doesn't fit, there are lines instead.

exit code: 0 all replicas completed, 1 a replica failed, 2 wrong recipe or arguments, 130 interrupted.
"""

_STATUS = """\
examples:
  composer-replication status file:///shared/run1
  composer-replication status runs/quickstart --watch
  composer-replication status file:///shared/run1 --json | jq .round
  composer-replication status file:///shared/run1 --watch --web

Reads the store and writes nothing. A replica is finished when it has trained its last step and holds the final weights.

Of replicas that run as jobs of a service it also shows the jobs: as their launcher saw them last, and when each was
heard of; with --jobs the services are asked (with their clients and credentials), and their answer is noted there.

--watch --web prints an address of this machine (127.0.0.1, which no other can reach) where a browser shows the page of
'report', and follows the run; its last page stays there until Ctrl-C. On a machine without a browser:
ssh -L 8765:127.0.0.1:8765 HOST, and --port 8765.
"""

_REPLICA = """\
One replica, on whatever machine it shall run, is

  python -m composer_replication.diloco.serverless.replica_entrypoint \\
      --recipe recipe.yaml --replica-id 0 --num-replicas 4 --rendezvous-uri file:///shared/run1

with one id from 0 to num-replicas - 1 for each process, and the same store and recipe for all. 'launch' does this for
replicas on this machine. --help of that module names its options and exit codes.
"""


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """(the parser, those of the commands)."""
    parser = argparse.ArgumentParser(
        prog="composer-replication",
        description="Train one model on replicas that meet in nothing but an object store (adaptive DiLoCo).",
        epilog=_TOP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    launch = command("launch", "run a recipe's fleet and watch it train", _LAUNCH)
    launch.add_argument("recipe", metavar="RECIPE", help="a YAML file")
    launch.add_argument(
        "overrides", nargs="*", metavar="key=value", help="put over the recipe, e.g. training.steps=200"
    )
    launch.add_argument("--dry-run", action="store_true", help="check all, read first batches, print the recipe")
    launch.add_argument("--resume", action="store_true", help="go on with the run in the recipe's output or store")
    launch.add_argument("--detach", action="store_true", help="return when the jobs are sent; they go on")
    launch.add_argument("--plain", action="store_true", help="lines instead of a live table")

    status = command("status", "show how a run stands", _STATUS)
    status.add_argument(
        "uri",
        metavar="URI",
        help="the run's store (file:///folder, or a folder), or the folder of a run on this machine",
    )
    status.add_argument("--control", metavar="URI", help="the run's second store, if it has one (docs/stores.md)")
    status.add_argument("--signing-key-file", metavar="FILE", help="the run's key, if it is signed (docs/security.md)")
    status.add_argument("--watch", action="store_true", help="again and again, until the run has ended or Ctrl-C")
    status.add_argument("--json", action="store_true", help="for programs: one JSON object (one a line with --watch)")
    status.add_argument("--jobs", action="store_true", help="ask the services how the jobs stand")
    status.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="pause of --watch (default 2)")

    status.add_argument("--web", action="store_true", help="with --watch: as a page for a browser on this machine")
    status.add_argument("--port", type=int, metavar="N", help="of that page (default: one that is free)")

    add_schedule(command)
    add_simulate(command)
    add_report(command)
    add_job_commands(command)
    add_tools(command)
    command("replica", "tell how one replica is started by hand", _REPLICA)
    return parser, commands.choices


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser, commands = _parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        parser.print_help()
        parser.exit()
    if not words[0].startswith("-") and words[0] not in commands:
        parser.error(f"there is no command {words[0]!r}.{_nearest(words[0], commands) or ' --help lists them.'}")
    args, rest = parser.parse_known_args(words)
    # argparse gives up on `launch RECIPE --plain key=value`: what is left over there is overrides.
    if rest and (
        args.command not in ("launch", "plan", "schedule", "simulate") or any(word.startswith("-") for word in rest)
    ):
        unknown = [word for word in rest if word.startswith("-")] or rest
        own = commands[args.command]
        hint = _nearest(unknown[0].partition("=")[0], own._option_string_actions)
        own.error(f"unrecognized arguments: {' '.join(unknown)}.{hint}".removesuffix("."))
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _nearest(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parse(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character gets a question mark
    # As `python -m` does, so that a recipe can name classes of the folder that one stands in.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        if args.command == "launch":
            if not args.dry_run:  # what it prints is YAML. Importing a trainer takes seconds
                print(f"checking {args.recipe} ...", flush=True)
            from composer_replication.cli.launch import launch

            return launch(
                args.recipe,
                args.overrides,
                dry_run=args.dry_run,
                resume=args.resume,
                plain=args.plain,
                detach=args.detach,
            )
        if args.command == "status":
            from composer_replication.cli.status import status

            return status(
                args.uri,
                control=args.control,
                signing_key_file=args.signing_key_file,
                watch=args.watch,
                as_json=args.json,
                every_seconds=args.every,
                ask=args.jobs,
                web=args.web,
                port=args.port,
            )
        if args.command == "schedule":
            from composer_replication.cli.schedule import schedule

            return schedule(args)
        if args.command == "simulate":
            from composer_replication.cli.simulate import simulate_command

            return simulate_command(args)
        if args.command == "report":
            from composer_replication.cli.report import report_command

            return report_command(args)
        code = run_job_command(args)
        if code is None:
            code = run_tool(args)
        if code is None:
            sys.stdout.write(_REPLICA)
        return code or 0
    except (ReplicationError, ValueError) as error:
        sys.stderr.write(f"composer-replication {args.command}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
