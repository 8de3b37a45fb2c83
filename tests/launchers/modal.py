"""A stand-in for Modal: its gRPC service as the client's own base class describes it, with containers of an `Engine`.

What a request says is checked against what the service knows; a call that isn't answered here is recorded, and fails
the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from composer_replication.diloco.serverless.backends.modal import ModalExecutor
from tests.launchers.backend import Backend
from tests.launchers.engine import Container, Engine

TOKEN = ("ak-of-the-tests", "as-of-the-tests")
# Fields of a sandbox's definition that a launch of ours may set; others are a misreading.
FIELDS = {"entrypoint_args", "image_id", "secret_ids", "resources", "timeout_secs", "scheduler_placement"}
FIELDS |= {"cloud_provider_str", "open_ports", "network_access", "volume_mounts", "cloud_bucket_mounts", "name"}
_call: ContextVar[str] = ContextVar("the call's key")


class Modal:
    """The service's state, and its answers: one method for each call, from request to response."""

    def __init__(self, engine: Engine) -> None:
        from modal_proto import api_pb2

        self.api = api_pb2
        self.engine = engine
        self.sandboxes: dict[str, tuple[Any, Container]] = {}  # id -> (request, container)
        self.created: list[Any] = []
        self.secrets: dict[str, dict[str, str]] = {}
        self.images: list[Any] = []
        self.apps: list[tuple[str, str]] = []  # (environment, name)
        self.results: dict[str, Any] = {}  # id -> what the service says, against what happened
        self.breaks: list[int] = []  # the next log streams break after so many lines
        self.unknown: list[str] = []
        self._down: set[str] = set()
        self._lock = threading.Lock()
        self._serve()

    # -- the service's calls -------------------------------------------------------------------------------------------

    def ClientHello(self, request: Any) -> Any:
        return self.api.ClientHelloResponse()

    def AuthTokenGet(self, request: Any) -> Any:
        return self.api.AuthTokenGetResponse(token="eyJhbGciOiJub25lIn0.eyJleHAiOjQxMDI0NDQ4MDB9.")

    def EnvironmentGetOrCreate(self, request: Any) -> Any:
        settings = self.api.EnvironmentSettings(image_builder_version="2025.06")
        metadata = self.api.EnvironmentMetadata(name=request.deployment_name or "main", settings=settings)
        return self.api.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    def AppGetOrCreate(self, request: Any) -> Any:
        if request.object_creation_type != self.api.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
            self.refuse("NOT_FOUND", "no such app")
        app = (request.environment_name, request.app_name)
        self.apps += [app] if app not in self.apps else []
        return self.api.AppGetOrCreateResponse(app_id=f"ap-{self.apps.index(app)}")

    def ImageGetOrCreate(self, request: Any) -> Any:
        self.images.append(request.image)
        done = self.api.GenericResult(status=self.api.GenericResult.GENERIC_STATUS_SUCCESS)
        metadata = self.api.ImageMetadata(image_builder_version="2025.06")
        return self.api.ImageGetOrCreateResponse(image_id=f"im-{len(self.images)}", result=done, metadata=metadata)

    def ImageFromId(self, request: Any) -> Any:
        return self.api.ImageFromIdResponse(image_id=request.image_id)

    def SecretGetOrCreate(self, request: Any) -> Any:
        secret_id = f"st-{len(self.secrets)}"
        self.secrets[secret_id] = dict(request.env_dict)
        return self.api.SecretGetOrCreateResponse(secret_id=secret_id)

    def VolumeGetOrCreate(self, request: Any) -> Any:
        if request.object_creation_type != self.api.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
            self.refuse("NOT_FOUND", "no such volume")
        return self.api.VolumeGetOrCreateResponse(volume_id=f"vo-{request.deployment_name}")

    def SandboxCreate(self, request: Any) -> Any:
        definition = request.definition
        if not definition.resources.gpu_config.gpu_type:
            self.refuse("INVALID_ARGUMENT", "sandboxes without a GPU are made by SandboxCreateV2")
        env = {key: value for one in definition.secret_ids for key, value in self.secrets[one].items()}
        sandbox_id = self._create(request, f"sb-{len(self.sandboxes):022d}", env)
        return self.api.SandboxCreateResponse(sandbox_id=sandbox_id, metadata=self._metadata(request))

    def SandboxCreateV2(self, request: Any) -> Any:
        env: dict[str, str] = {}
        for source in request.secret_sources:
            env |= self.secrets[source.secret_id] if source.secret_id else dict(source.env.contents)
        sandbox_id = self._create(request, f"sb-01{len(self.sandboxes):024d}", env)
        return self.api.SandboxCreateV2Response(sandbox_id=sandbox_id, task_id="ta-1", metadata=self._metadata(request))

    def _create(self, request: Any, sandbox_id: str, env: dict[str, str]) -> str:
        refusal = self.engine.refusal()
        if refusal:
            if refusal == "quota":
                self.refuse("RESOURCE_EXHAUSTED", "too many sandboxes")
            self._down.add(_call.get())  # for this call's repetitions, too, which the client makes by itself
            self.refuse("UNAVAILABLE", "no route")
        definition = request.definition
        odd = {field.name for field, _ in definition.ListFields()} - FIELDS
        if odd:
            self.refuse("INVALID_ARGUMENT", f"unexpected: {sorted(odd)}")
        if not 0 < definition.timeout_secs <= 24 * 3600:
            self.refuse("INVALID_ARGUMENT", f"timeout {definition.timeout_secs} isn't 1 to 86400")
        if any(one.definition.name == definition.name and box.running for one, box in self.sandboxes.values()):
            self.refuse("ALREADY_EXISTS", f"a sandbox named {definition.name} is running")
        self.created.append(request)
        container = self.engine.start(definition.name, definition.entrypoint_args, env)
        self.sandboxes[sandbox_id] = request, container
        return sandbox_id

    def _metadata(self, request: Any) -> Any:
        return self.api.SandboxHandleMetadata(app_id=request.app_id)

    def SandboxGetTaskId(self, request: Any) -> Any:
        return self.api.SandboxGetTaskIdResponse(task_id="ta-" + request.sandbox_id)

    def SandboxWait(self, request: Any) -> Any:
        if request.sandbox_id not in self.sandboxes:
            self.refuse("NOT_FOUND", f"no sandbox {request.sandbox_id}")
        created, container = self.sandboxes[request.sandbox_id]
        result = self.results.get(request.sandbox_id) or self._result(container)
        return self.api.SandboxWaitResponse(result=result, metadata=self._metadata(created))

    SandboxWaitV2 = SandboxWait

    def _result(self, container: Container) -> Any:
        kinds = self.api.GenericResult
        if container.running:
            return kinds()
        ended = {"expired": kinds.GENERIC_STATUS_TIMEOUT}
        ended |= dict.fromkeys(("stopped", "preempted"), kinds.GENERIC_STATUS_TERMINATED)
        code = container.exit_code or 0
        plain = kinds.GENERIC_STATUS_SUCCESS if code == 0 else kinds.GENERIC_STATUS_FAILURE
        status = ended.get(container.ended, plain)
        return kinds(status=status, exitcode=code if code >= 0 else 128 - code)

    def SandboxTerminate(self, request: Any) -> Any:
        _, container = self.sandboxes[request.sandbox_id]
        self.engine.stop(container)
        return self.api.SandboxTerminateResponse(existing_result=self._result(container))

    SandboxTerminateV2 = SandboxTerminate

    def SandboxListV2(self, request: Any) -> Any:
        """One at a time, newest first, so that paging is seen to work."""
        if request.include_finished or not request.app_id:
            self.refuse("INVALID_ARGUMENT", "lists an app's running sandboxes")
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        for number, (sandbox_id, (created, container)) in reversed(list(enumerate(self.sandboxes.items(), 1))):
            tags = {tag.tag_name: tag.tag_value for tag in created.tags}
            later = request.before_timestamp and number >= request.before_timestamp
            if created.app_id != request.app_id or not container.running or later:
                continue
            if wanted.items() <= tags.items():
                info = self.api.SandboxInfo(id=sandbox_id, created_at=number, metadata=self._metadata(created))
                return self.api.SandboxListResponse(sandboxes=[info])
        return self.api.SandboxListResponse()

    async def SandboxGetLogs(self, request: Any, send: Callable[[Any], Any]) -> None:
        _, container = self.sandboxes[request.sandbox_id]
        told = int(request.last_entry_id or 0)
        # A process's output is one stream in the engine: it goes out as standard output.
        ours = request.file_descriptor == self.api.FILE_DESCRIPTOR_STDOUT
        breaks = self.breaks.pop(0) if self.breaks and ours else None
        while True:
            ended = await asyncio.to_thread(self._more, container, told)
            for line in container.lines[told:] if ours else []:
                if breaks is not None and told >= breaks:
                    self.refuse("UNAVAILABLE", "the connection broke")
                told += 1
                items = [self.api.TaskLogs(data=line + "\n", file_descriptor=request.file_descriptor)]
                await send(self.api.TaskLogsBatch(items=items, entry_id=str(told)))
            if ended:
                await send(self.api.TaskLogsBatch(eof=True))
                return

    def _more(self, container: Container, told: int) -> bool:
        with self.engine.changed:
            self.engine.changed.wait_for(lambda: container.ended or len(container.lines) > told, timeout=0.5)
            return not container.running

    # -- serving -------------------------------------------------------------------------------------------------------

    def refuse(self, status: str, message: str) -> None:
        import grpclib

        raise grpclib.GRPCError(grpclib.Status[status], message)

    def _serve(self) -> None:
        from grpclib.server import Server
        from modal_proto.api_grpc import ModalClientBase

        methods = {name: self._answer(name) for name in ModalClientBase.__abstractmethods__}
        service = type("Service", (ModalClientBase,), methods)
        started = threading.Event()
        self._loop = asyncio.new_event_loop()

        async def start() -> None:
            self._server = Server([service()])
            await self._server.start("127.0.0.1", 0)
            port = self._server._server.sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            started.set()

        def run() -> None:
            self._loop.run_until_complete(start())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert started.wait(30)

    def _answer(self, name: str) -> Any:
        async def answer(service: Any, stream: Any) -> None:
            request = await stream.recv_message()
            told = (stream.metadata.get("x-modal-token-id"), stream.metadata.get("x-modal-token-secret"))
            if told != TOKEN:
                self.refuse("UNAUTHENTICATED", "Token ID is malformed or doesn't exist")
            _call.set(stream.metadata.get("x-idempotency-key", ""))
            if _call.get() in self._down:
                self.refuse("UNAVAILABLE", "no route")
            call = getattr(self, name, None)
            if call is None:
                self.unknown.append(name)
                self.refuse("UNIMPLEMENTED", f"the stand-in doesn't know {name}")
            elif inspect.iscoroutinefunction(call):
                await call(request, stream.send_message)
            else:
                await stream.send_message(await asyncio.to_thread(self._one_at_a_time, call, request))

        return answer

    def _one_at_a_time(self, call: Callable[[Any], Any], request: Any) -> Any:
        with self._lock:
            return call(request)

    def close(self) -> None:
        async def stop() -> None:
            self._server.close()
            await self._server.wait_closed()
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            for connection in list(self._loop._transports.values()):
                connection.abort()  # the client has closed it, which this loop may not have heard yet
            await self._loop.shutdown_default_executor()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def served(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modal]:
    """The service, and an environment in which the client talks to it."""
    modal = pytest.importorskip("modal")
    service = Modal(engine)
    monkeypatch.setenv("MODAL_SERVER_URL", service.url)
    monkeypatch.setenv("MODAL_TOKEN_ID", TOKEN[0])
    monkeypatch.setenv("MODAL_TOKEN_SECRET", TOKEN[1])
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(Path(__file__).parent / "no-modal.toml"))
    try:
        yield service
    finally:
        with contextlib.suppress(modal.exception.AuthError):
            client = modal.Client.from_env()  # keeps one connection for the whole process
            with contextlib.suppress(modal.exception.Error):
                client.hello()  # whoever is answered has left the middle of being accepted, which a close leaks
            client.close()
        service.close()


@contextlib.contextmanager
def backend(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    with served(engine, monkeypatch) as service:
        yield Backend(
            engine,
            make=lambda **more: ModalExecutor(**{"image": "registry/image:1", "gpu": "A100-40GB", **more}),
            container=lambda job_id: service.sandboxes[job_id][1],
            bad_settings=[
                ({"gpu": "A100-40BG"}, "Did you mean 'A100-40GB'"),
                ({"gpu": "H100:80"}, "must be 1 to 8"),
                ({"volumes": {"data": "runs"}}, "must be an absolute path"),
                ({"app": "my trainings"}, "use letters, digits, dashes"),
                ({"volumes": {"/data": "my runs"}}, "can't be a Modal volume's name"),
                ({"volumes": {"/data": "gs://bucket"}}, "must be a Modal volume's name"),
            ],
            unknown=service.unknown,
        )
