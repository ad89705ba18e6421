"""How does the kubelet stand-in speak to the API server? The few requests a kubelet makes, without a client library."""

import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

Manifest = dict[str, Any]


class Api:
    """The few requests a kubelet makes."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self.url = cluster["server"]
        self.trust = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self.headers = {"Authorization": f"Bearer {user['token']}"}

    async def __aenter__(self) -> "Api":
        connector = aiohttp.TCPConnector(ssl=self.trust, limit=0)
        self.session = aiohttp.ClientSession(
            self.url, headers=self.headers, connector=connector, read_bufsize=2**22, timeout=aiohttp.ClientTimeout()
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def send(
        self, method: str, path: str, body: object = None, *, kind: str = "application/json", absent_ok: bool = False
    ) -> Manifest:
        """Make one request; a missing object is an answer where the caller says so."""
        data = None if body is None else json.dumps(body)
        async with self.session.request(method, path, data=data, headers={"Content-Type": kind}) as answer:
            if answer.status in (404, 409) and absent_ok:
                return {}
            if answer.status >= 400:
                raise RuntimeError(f"{method} {path}: {answer.status} {await answer.text()}")
            return dict(await answer.json())

    async def watch(self, path: str) -> AsyncIterator[tuple[str, Manifest]]:
        """Yield (ADDED | MODIFIED | DELETED, object) for ever; lists again when the server forgot where we were."""
        while True:
            listed = await self.send("GET", path)
            version = listed["metadata"]["resourceVersion"]
            for item in listed["items"]:
                yield "ADDED", item
            query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "3600"}
            async with self.session.get(path, params=query) as stream:
                async for line in stream.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        break
                    yield event["type"], event["object"]
