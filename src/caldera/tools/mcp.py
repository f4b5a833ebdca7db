"""Tools of MCP servers. The one file that needs the library `mcp` (extra `mcp`)."""

from __future__ import annotations

import asyncio
import atexit
import json
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from caldera.errors import ConfigError
from caldera.installation import install_command
from caldera.threads import in_thread
from caldera.tools.base import BaseTool, ShippedTool, ToolResponse
from caldera.tools.schemas import OpenAIFunctionToolSchema

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

SECONDS_TO_CONNECT = 60.0
SECONDS_TO_CLOSE = 10.0
Result = TypeVar("Result")


class MCPTool(ShippedTool):
    """A tool of a server, which checks arguments and carries out calls."""

    server: Server | None = None
    """Given by `mcp_tools`."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        assert self.server is not None, "made by mcp_tools"
        result = await self.server.call(self.name, parameters)
        response = _response(result)
        if result.is_error:
            raise RuntimeError(response.text or "the server says that the call failed")
        return response, None, {}

    async def close(self) -> None:
        if self.server is not None:
            await in_thread(self.server.close)


def _response(result: CallToolResult) -> ToolResponse:
    """Text as it is; what else there is, told apart by its kind."""
    texts: list[str] = []
    images: list[Any] = []
    for block in result.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "image":
            images.append(block.data)
        else:
            texts.append(json.dumps(block.model_dump(mode="json", exclude_none=True)))
    return ToolResponse("\n".join(texts), images or None)


# ---------------------------------------------------------------------- from the configuration


def mcp_tools(
    cls: type[BaseTool], config: Mapping[str, Any], given: Any, folder: Path, where: str
) -> list[BaseTool]:
    """A tool of `cls` for each selected one of the servers; `given` is the entry's `mcp` and
    `folder` the one that relative paths may also count from."""
    if not issubclass(cls, MCPTool):
        raise ConfigError(f"{where}: {cls.__name__} must extend caldera.tools.mcp.MCPTool")
    keys = ("mcp_servers_config_path", "tool_selected_list")
    if not isinstance(given, Mapping) or not given.get(keys[0]) or set(given) - set(keys):
        raise ConfigError(f"{where}={given!r} must have the keys {' and '.join(keys)}")
    names = given.get(keys[1])
    if names is not None and not _are_names(names):
        raise ConfigError(f"{where}.{keys[1]}={names!r} must be a list of names; without it, all")
    _need_library()
    servers = _servers(str(given[keys[0]]), folder, f"{where}.{keys[0]}")
    try:
        return _selected(cls, config, servers, names, f"{where}.{keys[1]}")
    except ConfigError:
        for server in servers:
            server.close()
        raise


def _are_names(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(one, str) for one in given)


def _selected(
    cls: type[MCPTool],
    config: Mapping[str, Any],
    servers: list[Server],
    names: list[str] | None,
    where: str,
) -> list[BaseTool]:
    offered: dict[str, Server] = {}
    tools: list[BaseTool] = []
    for server in servers:
        for tool in server.tools():
            if tool.name in offered:
                both = f"{offered[tool.name].name} and {server.name}"
                raise ConfigError(f"{where}: {both} both have a tool named {tool.name!r}")
            offered[tool.name] = server
            if names is None or tool.name in names:
                tools.append(_made(cls, config, tool, server))
    for name in names or ():
        if name not in offered:
            raise ConfigError(f"{where} names {name!r}; the servers have {', '.join(offered)}")
    return tools


def _made(cls: type[MCPTool], config: Mapping[str, Any], tool: Tool, server: Server) -> MCPTool:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    schema = {"type": "function", "function": function}
    made = cls(config, OpenAIFunctionToolSchema.model_validate(schema, server.name))
    made.server = server
    return made


def _servers(path: str, folder: Path, where: str) -> list[Server]:
    file = next((p for p in (Path(path).expanduser(), folder / path) if p.is_file()), None)
    if file is None:
        raise ConfigError(f"{where}={path!r} does not exist")
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{where}={path!r} is not JSON: {error}") from error
    entries = read.get("mcpServers") if isinstance(read, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"{where}={path!r} must hold servers under the key 'mcpServers'")
    return [Server(name, entry, f"{path}: mcpServers.{name}") for name, entry in entries.items()]


# ---------------------------------------------------------------------- connections


class Server:
    """One server: a process that is started, or an address. It is connected to when it is first
    needed, and again after the connection broke.

    The connection lives in a thread with its own event loop: callers come and go.
    """

    def __init__(self, name: str, entry: Any, where: str) -> None:
        self.name = name
        _check_entry(entry, where)
        self._entry: Mapping[str, Any] = entry
        self._where = where
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()  # many may find at once that the server is gone
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"mcp {name}", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    def tools(self) -> list[Tool]:
        """The server's tools. ConfigError where it cannot be reached."""
        asked = asyncio.run_coroutine_threadsafe(self._list(), self._loop)
        try:
            return asked.result(SECONDS_TO_CONNECT)
        except (ConnectionError, TimeoutError) as error:
            asked.cancel()
            told = str(error) or f"no response in {SECONDS_TO_CONNECT:g} s"
            raise ConfigError(f"{self._where}: {told}") from error

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """The result of a call; ConnectionError if the server is gone."""
        return await self._there(self._call(name, arguments))

    def close(self) -> None:
        """End the connection; a process that was started is ended, too."""
        atexit.unregister(self.close)
        if not self._thread.is_alive():
            return
        ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        with suppress(TimeoutError):  # what is left goes with this process
            ending.result(2 * SECONDS_TO_CLOSE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS_TO_CLOSE)
        self._loop.close()

    async def _there(self, work: Coroutine[Any, Any, Result]) -> Result:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    # ------------------------------------------------------------------ in the thread

    async def _list(self) -> list[Tool]:
        from mcp import MCPError

        client = (await self._connected()).client
        found: list[Tool] = []
        cursor: str | None = None
        while True:
            try:
                page = await client.list_tools(cursor=cursor)
            except (MCPError, ValueError) as error:  # refused, or answered with something else
                told = f"the server {self.name} does not list its tools: {error}"
                raise ConnectionError(told) from error
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def _call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        from anyio import BrokenResourceError, ClosedResourceError
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST

        connection = await self._connected()
        try:
            return await connection.client.call_tool(name, arguments)
        except (BrokenResourceError, ClosedResourceError) as error:
            connection.lost.set()
            raise ConnectionError(f"the server {self.name} is gone") from error
        except MCPError as error:
            # The library's message where a server that was started anew does not know the session.
            is_unknown = (error.code, error.message) == (INVALID_REQUEST, "Session terminated")
            if error.code == CONNECTION_CLOSED or ("url" in self._entry and is_unknown):
                connection.lost.set()
                raise ConnectionError(f"the server {self.name} is gone: {error.message}") from error
            raise RuntimeError(error.message) from error

    async def _connected(self) -> _Connection:
        async with self._connecting:
            if self._connection is None or not self._connection.is_there:
                await self._end()
                self._connection = _Connection(self.name, self._entry)
            await asyncio.shield(self._connection.ready)
            return self._connection

    async def _end(self) -> None:
        if self._connection is not None:
            await self._connection.end()


class _Connection:
    """One connection, held by a separate task until it is lost: its parts must be left by the
    task that entered them. To be made in the thread of its server."""

    def __init__(self, server: str, entry: Mapping[str, Any]) -> None:
        self.lost = asyncio.Event()
        self.ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(server, entry))

    @property
    def is_there(self) -> bool:
        return not (self.lost.is_set() or self._holder.done())

    @property
    def client(self) -> Client:
        """Once it is `ready`."""
        return self.ready.result()

    async def end(self) -> None:
        self.lost.set()
        if not self.ready.done():  # a silent server would be waited for without end
            self._holder.cancel()
        await asyncio.wait([self._holder], timeout=SECONDS_TO_CLOSE)

    async def _hold(self, server: str, entry: Mapping[str, Any]) -> None:
        try:
            async with _client(entry) as client:
                self.ready.set_result(client)
                await self.lost.wait()
        except Exception as error:  # noqa: BLE001 -- the libraries below raise all kinds
            if not self.ready.done():
                told = f"the server {server} cannot be connected to: {_told(error)}"
                self.ready.set_exception(ConnectionError(told))
        finally:
            self.ready.cancel()  # if it is not settled


def _told(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


BY_COMMAND = ("command", "args", "env", "cwd")
BY_URL = ("url", "headers")
TRANSPORTS = {"command": ("stdio",), "url": ("http", "streamable-http", "streamable_http")}


def _check_entry(entry: Any, where: str) -> None:
    if not isinstance(entry, Mapping) or ("command" in entry) == ("url" in entry):
        raise ConfigError(f"{where} must have either a 'command' or a 'url'")
    kind = "command" if "command" in entry else "url"
    known = BY_COMMAND if kind == "command" else BY_URL
    for key, value in entry.items():
        if key in ("type", "transport"):  # what many files say beside it
            if value not in TRANSPORTS[kind]:
                raise ConfigError(
                    f"{where}.{key}={value!r}: with a {kind} it must be one of "
                    f"{', '.join(TRANSPORTS[kind])}"
                )
        elif key not in known:
            raise ConfigError(f"{where}.{key} is unknown; there are {', '.join(known)}")


def _need_library() -> None:
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"config.type=mcp needs the library mcp: {install_command('mcp')}"
        ) from error


@asynccontextmanager
async def _client(entry: Mapping[str, Any]) -> AsyncIterator[Client]:
    import httpx2
    from mcp import Client, StdioServerParameters
    from mcp.client.streamable_http import streamable_http_client

    if "command" in entry:
        given = {key: entry[key] for key in BY_COMMAND if key in entry}
        async with Client(StdioServerParameters(**given)) as client:
            yield client
        return
    # Responses may take as long as the tool's own timeout allows.
    timeout = httpx2.Timeout(SECONDS_TO_CONNECT, read=None)
    async with (
        httpx2.AsyncClient(headers=entry.get("headers"), timeout=timeout) as http,
        Client(streamable_http_client(entry["url"], http_client=http)) as client,
    ):
        yield client
