"""Where exactly can the operator die? Just before and just after each of its writes: a proxy that stops it there.

Plain HTTP in front of the API server. Each write (method and path, leases and events apart) is met three times: the
first time the operator is killed before the request is passed on, the second time after it was stored and before the
answer; from then on it passes.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web
from tests.cluster.control_plane import ControlPlane, write_kubeconfig
from tests.cluster.rest import Api

_HARMLESS = ("/leases", "/events")


class DeadlyProxy:
    """Kills through `kill` at every write, twice."""

    def __init__(self, api: Api, kill: Callable[[], None]) -> None:
        self.api = api
        self.kill = kill
        self.met: Counter[str] = Counter()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass one request on, unless it is time to die."""
        write = f"{request.method} {request.path}"
        deadly = request.method not in ("GET", "HEAD") and not any(part in request.path for part in _HARMLESS)
        if deadly:
            self.met[write] += 1
        if deadly and self.met[write] == 1:
            self.kill()
            raise web.HTTPServiceUnavailable
        body = await request.read()
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with self.api.session.request(request.method, str(request.rel_url), data=body, headers=headers) as answer:
            if deadly and self.met[write] == 2:
                self.kill()
            passed = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await passed.prepare(request)
            async for chunk in answer.content.iter_any():
                await passed.write(chunk)
            await passed.write_eof()
            return passed


@contextmanager
def deadly_api(plane: ControlPlane, *, kill: Callable[[], None]) -> Iterator[tuple[Path, Counter[str]]]:
    """Serve the proxy in a thread; yields a kubeconfig that leads through it, and how often each write was met."""
    ready, stop = threading.Event(), asyncio.Event()
    proxy = DeadlyProxy(Api(plane.kubeconfig), kill)
    loop = asyncio.new_event_loop()
    ports: list[int] = []

    async def serve() -> None:
        application = web.Application(client_max_size=2**24)
        application.router.add_route("*", "/{path:.*}", proxy.handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        async with proxy.api:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            ports.append(runner.addresses[0][1])
            ready.set()
            await stop.wait()
            await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait(10)
    file = plane.directory / f"proxy-{ports[0]}.kubeconfig"
    write_kubeconfig(file, url=f"http://127.0.0.1:{ports[0]}", authority=plane.directory / "api.crt", token="by-proxy")
    try:
        yield file, proxy.met
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
