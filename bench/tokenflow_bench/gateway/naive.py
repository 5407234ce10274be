"""The pass-through that one writes first: FastAPI's StreamingResponse over httpx. Nothing but the bytes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=os.environ["ENGINE_URL"], limits=limits, timeout=300) as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=_lifespan)


@app.api_route("/{path:path}", methods=["GET", "POST"])
async def relay(path: str, request: Request) -> StreamingResponse:
    """Whatever it is, to the engine and back."""
    client: httpx.AsyncClient = app.state.client
    sent = client.build_request(
        request.method,
        f"/{path}",
        content=await request.body(),
        headers={"content-type": request.headers.get("content-type", "application/json")},
    )
    answer = await client.send(sent, stream=True)

    async def body() -> AsyncIterator[bytes]:
        try:
            async for data in answer.aiter_raw():
                yield data
        finally:
            await answer.aclose()

    return StreamingResponse(body(), answer.status_code, media_type=answer.headers.get("content-type"))
