"""The OpenAPI document is true to what is served: schemathesis asks for all that is in it, and for more."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support import scenarios
from support.gateway import RunningGateway, running_gateway
from support.replay_engine import ReplayEngine, Script, SeenRequest, Send

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
SEED = 20261130
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
]
PLAIN = {
    "/v1/chat/completions": "chat_plain",
    "/v1/completions": "completions_plain",
    "/v1/messages": "messages_plain",
    "/v1/responses": "responses_plain",
}
STREAMED = {
    "/v1/chat/completions": "chat_stream",
    "/v1/completions": "completions_stream",
    "/v1/messages": "messages_stream",
    "/v1/responses": "responses_stream",
}


class AnsweringEngine(ReplayEngine):
    """Answers whatever is asked with a recording of its route, streamed where that was asked for."""

    def script_for(self, seen: SeenRequest) -> Script:
        if seen.path in PLAIN:
            streamed = seen.json().get("stream")
            return self.scripts[(STREAMED if streamed else PLAIN)[seen.path]]
        return self.scripts.get(seen.path) or document({"object": "anything"})


def document(value: object) -> Script:
    body = json.dumps(value).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    return Script(headers=headers, steps=[Send(body)])


def answering_engine() -> AnsweringEngine:
    scripts = scenarios.recordings(*PLAIN.values(), *STREAMED.values(), "models")
    scripts["/v1/models"] = scripts["models"]
    scripts["/model_info"] = document({})
    return AnsweringEngine(scripts)


async def explored(gateway: RunningGateway, folder: Path, *more: str, examples: int = 8) -> tuple[int, str]:
    """What schemathesis says of the gateway: exit status, and its report."""
    process = await asyncio.create_subprocess_exec(
        *(str(SCHEMATHESIS), "run", f"{gateway.base_url}/openapi.json"),
        *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing"),
        *("--seed", str(SEED), "--max-examples", str(examples), "--warnings", "off"),
        *("--generation-database", "none", "--suppress-health-check", "all", *more),
        cwd=folder,  # it keeps a cache where it runs
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_what_is_served_is_what_the_document_says(tmp_path: Path) -> None:
    async with (
        answering_engine() as engine,
        running_gateway({"url": engine.base_url, "link": "off"}) as gateway,
    ):
        status, report = await explored(gateway, tmp_path)
        assert status == 0, report
        assert len({seen.path for seen in engine.requests}) > len(PLAIN), report
        await gateway.everything_released()


async def test_a_document_that_is_not_true_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: an answer that lacks what the document promises."""
    async with (
        answering_engine() as engine,
        running_gateway({"url": engine.base_url, "link": "off"}) as gateway,
    ):
        monkeypatch.setattr(gateway.app.registry, "models", lambda **_: [{"name": "no id"}])
        status, report = await explored(gateway, tmp_path, "--include-path", "/v1/models", examples=2)
    assert status == 1, report
    assert '"id" is a required property' in report


async def test_every_route_is_in_the_document_with_its_methods() -> None:
    async with running_gateway({"url": "http://127.0.0.1:9", "link": "off"}) as gateway:
        spec: dict[str, Any] = (await gateway.client.get("/openapi.json")).json()
        for path, operations in spec["paths"].items():
            allowed = await gateway.client.options(path.replace("{", "").replace("}", ""))
            assert allowed.status_code == 204, path
            named = {method.strip().lower() for method in allowed.headers["allow"].split(",")}
            assert named - {"options", "head"} == set(operations), path
