"""Worlds of real processes: forked from one that has imported everything, each with a launcher's variables."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from tests.support.servers import free_port

__all__ = ["World", "free_port"]

_STUCK_SECONDS = 60  # then it says where
_servers: dict[tuple[str, ...], forkserver.ForkServer] = {}


def _server(preload: Sequence[str]) -> forkserver.ForkServer:
    """One for each list of imports: that of multiprocessing keeps the list that it was started with, whoever asks."""
    if tuple(preload) not in _servers:
        server = _servers[tuple(preload)] = forkserver.ForkServer()
        server.set_forkserver_preload(list(preload))
    return _servers[tuple(preload)]


def _child(script: Callable[..., Any], arguments: tuple[Any, ...], environ: dict[str, str], pipe: Connection) -> None:
    os.environ.update(environ)
    faulthandler.dump_traceback_later(_STUCK_SECONDS)
    code = 0
    try:
        pipe.send((True, script(*arguments)))
    except SystemExit as error:  # an orderly end before the script's
        code = error.code if isinstance(error.code, int) else 1
        pipe.send((True, code))
    except BaseException:
        code = 1
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(code)  # nothing waits for process groups that lost a member


class World:
    """`size` processes as `torchrun --nproc-per-node size` starts them, `script(rank, *arguments)` in each."""

    def __init__(
        self,
        preload: Sequence[str],
        script: Callable[..., Any],
        arguments: tuple[Any, ...] = (),
        *,
        size: int,
        ranks: Sequence[int] | None = None,
        port: int | None = None,
        **environ: str,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        connect = _server(preload).connect_to_new_process
        port = port or free_port()
        self.pipes: dict[int, Connection] = {}
        self.processes: dict[int, Any] = {}
        for rank in ranks if ranks is not None else range(size):
            mine, theirs = context.Pipe()
            launcher = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
            launcher |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            launcher |= {"OMP_NUM_THREADS": "1", **environ}
            process = context.Process(target=_child, args=(script, (rank, *arguments), launcher, theirs), daemon=True)
            with mock.patch.object(forkserver, "connect_to_new_process", connect):
                process.start()
            theirs.close()
            self.pipes[rank], self.processes[rank] = mine, process

    def end(self, seconds: float = 90, *, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """What each of these processes (all) returned, or its exit status; fails with their tracebacks."""
        answers = {}
        for rank, pipe in self.pipes.items():
            if ranks is not None and rank not in ranks:
                continue
            if not pipe.poll(seconds):
                for process in self.processes.values():
                    process.kill()
                raise AssertionError(f"rank {rank} hangs; the others: {answers}")
            answers[rank] = pipe.recv()
        for rank in answers:
            self.processes[rank].join(30)
        problems = [f"rank {rank}:\n{answer}" for rank, (good, answer) in answers.items() if not good]
        assert not problems, "\n".join(problems)
        return {rank: answer for rank, (_, answer) in answers.items()}
