"""The small-scale reproduction of docs/results.md.

    python -m benchmarks.reproduction run [--groups main eight] [--variants autoloco diloco] [--seeds 1] [--jobs 2]
    python -m benchmarks.reproduction text
    python -m benchmarks.reproduction tables [--check]

`run` trains what docs/results/reproduction doesn't hold yet: about two minutes a run of four replicas on a quiet core.
`text` fetches the prose of one group (Debian and Ubuntu only). `tables` writes every table and figure of
docs/results.md anew from what is kept there; with `--check` it only says whether they would change.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.reproduction.run import Job, jobs, run_all, run_one
from benchmarks.reproduction.study import GROUPS


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.reproduction", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train what isn't kept yet")
    run.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    run.add_argument("--variants", nargs="+", default=[])
    run.add_argument("--seeds", nargs="+", type=int, default=[])
    run.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at a time (default 2)")
    one = commands.add_parser("one", help="train one run")
    one.add_argument("group", choices=GROUPS)
    one.add_argument("variant")
    one.add_argument("seed", type=int)
    commands.add_parser("text", help="fetch the prose of the group `prose` from Debian")
    tables = commands.add_parser("tables", help="tables and figures of docs/results.md from what is kept")
    tables.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something would change")
    args = parser.parse_args()
    if args.command == "one":
        run_one(Job(args.group, args.variant, args.seed))
        return 0
    if args.command == "text":
        from benchmarks.reproduction.debian_text import fetch

        print(fetch())
        return 0
    if args.command == "tables":
        from benchmarks.reproduction.tables import write_results

        return write_results(check=args.check)
    return 1 if run_all(list(jobs(args.groups, args.variants, args.seeds)), at_once=args.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
