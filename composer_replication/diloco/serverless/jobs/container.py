"""What runs first inside a job: fetch what the launcher sent, run the replica, tell the store how it goes.

    python -m composer_replication.diloco.serverless.jobs.container --job NAME --replica-id 0 --num-replicas 4 \\
        --rendezvous-uri s3://bucket/run1 -- python -m ... --recipe=@recipe

Invariant: the replica's process is a child of this one, so that its end is told however it comes about; only the end of
the whole machine goes unsaid. Nothing of torch or a trainer is loaded here. Code from the store is used only if it has
the hash that came with the command.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from composer_replication import __version__
from composer_replication.diloco.serverless.exit_codes import Exit, again, describe
from composer_replication.diloco.serverless.jobs.encoded import decoded
from composer_replication.diloco.serverless.jobs.marks import Mark, Marks
from composer_replication.errors import ExecutorError, ReplicationError, StoreError
from composer_replication.isolate import REPLICA, REPLICAS, STORE
from composer_replication.store import open_store

__all__ = ["main"]

RECIPE = "@recipe"  # stands for the recipe's path in the replica's command
BEAT_SECONDS = 30.0
_SHIP_SECONDS = 2.0
_LAST_WORDS_SECONDS = 5.0
_MAX_RESULT_BYTES = 256 * 1024
_MAX_CODE_BYTES = 256 << 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m composer_replication.diloco.serverless.jobs.container",
        description="Run one replica inside a job and tell its launcher, through the store, how it goes.",
    )
    add = parser.add_argument
    add("--job", required=True, help="the job's name")
    add("--replica-id", type=int, required=True)
    add("--num-replicas", type=int, required=True)
    add("--rendezvous-uri", required=True, help="URI of the store that the fleet shares")
    add("--recipe-sha256", metavar="HASH", help=f"fetch this recipe; its path takes the place of {RECIPE}")
    add("--code-sha256", metavar="HASH", help="fetch this archive; its folder becomes the working directory")
    add("--requirement", action="append", default=[], metavar="SPEC", help="install this with pip first")
    add("--output", metavar="FOLDER", help="for checkpoints and result (default: a temporary folder)")
    add("--variable", action="append", default=[], metavar="NAME=VALUE", help="set this in the environment")
    add("--once", action="store_true", help="do nothing if this job has ended before, well or not")
    add("--ship-logs", action="store_true", help="copy the output into the store")
    add("command", nargs="+", help="what to run, after --")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one job; returns its exit code."""
    args = _parser().parse_args(decoded(sys.argv[1:] if arguments is None else arguments))
    os.environ.update(one.partition("=")[::2] for one in args.variable)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    versions = f"composer-replication {__version__}, Python {platform.python_version()}"
    hello = f"job {args.job}: replica {args.replica_id} of {args.num_replicas} on {platform.node()}, {versions}"
    print(hello, flush=True)
    try:
        marks = Marks(open_store(args.rendezvous_uri))
        before = marks.read(args.replica_id, args.job)
        if before is not None and before.exit_code is not None and (before.exit_code == 0 or args.once):
            # Services start a container again that has ended, and launchers submit again what they have lost sight of.
            print(f"job {args.job}: it has ended before ({describe(before.exit_code)}); nothing is done", flush=True)
            return before.exit_code if before.exit_code >= 0 else 128 - before.exit_code
        now = time.time()
        mark = Mark(
            *(args.job, args.replica_id),
            starts=before.starts + 1 if before is not None else 1,
            began=before.began if before is not None else now,
            seen=now,
            host=platform.node(),
            versions=versions,
        )
        marks.mark(mark)
        found = f"store {marks.store.uri}: ok"
        print(found, flush=True)
    except (ReplicationError, ValueError) as error:
        print(f"job {args.job}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return Exit.STORE if isinstance(error, StoreError) else Exit.SETTINGS
    return _Container(args, marks, mark, told=(hello, found)).run()


class _Container:
    def __init__(self, args: argparse.Namespace, marks: Marks, mark: Mark, told: Sequence[str]) -> None:
        self.args = args
        self.marks = marks
        self.mark = mark
        self.folder = Path(args.output or tempfile.mkdtemp(prefix="replica-"))
        self.process: subprocess.Popen[bytes] | None = None
        self.asked_to_stop = False
        self._log = _ShippedLog(marks, args.job) if args.ship_logs else None
        if self._log is not None:
            self._log.add("".join(f"{line}\n" for line in told))

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            code = self._replica(*self._prepared())
        except (ReplicationError, OSError) as error:
            self._say(f"job {self.args.job}: {error}")
            code = Exit.STORE if isinstance(error, StoreError) else Exit.SETTINGS
        self._say(f"job {self.args.job}: {describe(code)}")
        if self._log is not None:
            self._log.close()
        self._end(code)
        return code if code >= 0 else 128 - code

    def _prepared(self) -> tuple[list[str], dict[str, str], Path]:
        """(the replica's command, its environment, its working directory)."""
        args, env, place = self.args, dict(os.environ), Path.cwd()
        if args.code_sha256:
            place = Path(tempfile.mkdtemp(prefix="code-"))
            unpack(self.marks.fetch(args.code_sha256), place)
            env["PYTHONPATH"] = os.pathsep.join([str(place), *filter(None, [env.get("PYTHONPATH")])])
            self._say(f"code {args.code_sha256[:12]}: in {place}")
        if args.requirement:
            self._say(f"installing {' '.join(args.requirement)}")
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            done = subprocess.run(
                [*pip, *args.requirement], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
            if done.stdout:
                self._say(done.stdout.rstrip("\n"))
            if done.returncode:
                raise ExecutorError(f"pip could not install {' '.join(args.requirement)}: its words are above")
        words = list(args.command)
        if words[0] == "python":
            words[0] = sys.executable
        if args.recipe_sha256:
            recipe = self.folder / "recipe.yaml"
            recipe.write_bytes(self.marks.fetch(args.recipe_sha256))
            words = [word.replace(RECIPE, str(recipe)) for word in words]
        if any("replica_entrypoint" in word for word in words):
            words.append(f"--output={self.folder}")
        env |= {
            "PYTHONUNBUFFERED": "1",
            REPLICA: str(args.replica_id),
            REPLICAS: str(args.num_replicas),
            STORE: args.rendezvous_uri,
        }
        return words, env, place

    def _replica(self, words: list[str], env: dict[str, str], place: Path) -> int:
        stop = threading.Event()
        process = subprocess.Popen(words, env=env, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.process = process
        if self.asked_to_stop:
            process.terminate()
        assert process.stdout is not None
        beat = threading.Thread(target=self._beat, args=(stop,), daemon=True)
        pump = threading.Thread(target=self._pump, args=(process.stdout,), daemon=True)
        for thread in (beat, pump):
            thread.start()
        code = process.wait()
        pump.join(_LAST_WORDS_SECONDS)  # what it has left behind, such as a data loader's worker, may hold the pipe
        stop.set()
        beat.join()
        return code

    def _pump(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                text = line.decode("utf-8", errors="replace")
                sys.stdout.write(text)
                sys.stdout.flush()
                if self._log is not None:
                    self._log.add(text)

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(BEAT_SECONDS):
            with contextlib.suppress(ReplicationError):  # the next one will do
                self.marks.mark(replace(self.mark, seen=time.time()))

    def _end(self, code: int) -> None:
        state = "completed" if code == 0 else "preempted" if again(code) == "preemption" else "failed"
        ended = replace(self.mark, state=state, exit_code=code, seen=time.time(), result=self._result())
        try:
            self.marks.mark(ended)
        except ReplicationError as error:
            print(f"job {self.args.job}: the store didn't take how it ended: {error}", file=sys.stderr, flush=True)

    def _result(self) -> dict[str, Any]:
        path = self.folder / "result.json"
        try:
            if path.stat().st_size > _MAX_RESULT_BYTES:
                return {}
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}

    def _stop(self, number: int, frame: Any) -> None:
        self.asked_to_stop = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def _say(self, text: str) -> None:
        print(text, flush=True)
        if self._log is not None:
            self._log.add(text + "\n")


class _ShippedLog:
    """Output on its way to the store, a part every two seconds at most."""

    def __init__(self, marks: Marks, job: str) -> None:
        self._marks, self._job = marks, job
        self._part = marks.count_log(job)
        self._text: list[str] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, text: str) -> None:
        with self._lock:
            self._text.append(text)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._ship()

    def _run(self) -> None:
        while not self._over.wait(_SHIP_SECONDS):
            self._ship()

    def _ship(self) -> None:
        with self._lock:
            text, self._text = "".join(self._text), []
        if text:
            try:
                self._marks.add_log(self._job, self._part, text)
                self._part += 1
            except ReplicationError:  # the next part will hold it
                with self._lock:
                    self._text.insert(0, text)


def unpack(archive: bytes, folder: Path) -> None:
    """A tar.gz of plain files and folders. Raises ExecutorError for links, devices and paths that lead outside."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(archive)) as zipped:
            contents = zipped.read(_MAX_CODE_BYTES + 1)
        if len(contents) > _MAX_CODE_BYTES:
            raise ExecutorError(f"the code's archive holds more than {_MAX_CODE_BYTES} bytes: not used")
        with tarfile.open(fileobj=io.BytesIO(contents), mode="r:") as tar:
            for member in tar.getmembers():
                inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
                if not inside or not (member.isfile() or member.isdir()):
                    raise ExecutorError(f"the code's archive holds {member.name!r}, which isn't a plain file: not used")
                if member.isdir():
                    (folder / member.name).mkdir(parents=True, exist_ok=True)
                    continue
                target = folder / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None
                target.write_bytes(source.read())
                target.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ExecutorError(f"the code's archive can't be read: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
