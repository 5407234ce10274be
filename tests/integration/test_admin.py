"""Who sees the admin views."""

from __future__ import annotations

import pytest

from support.gateway import running_gateway

ENGINE = {"url": "http://127.0.0.1:9", "link": "off"}


@pytest.mark.parametrize("path", ["/admin/engines", "/admin/streams"])
async def test_with_a_token_only_its_holder(path: str) -> None:
    async with running_gateway(ENGINE, admin_token="hush") as gateway:
        refused = await gateway.client.get(path)
        assert refused.status_code == 401
        assert "bearer token" in refused.json()["error"]["message"]
        assert (await gateway.client.get(path, headers={"authorization": "Bearer nope"})).status_code == 401
        assert (await gateway.client.get(path, headers={"authorization": "Bearer hush"})).status_code == 200
        assert (await gateway.client.get(path, headers={"authorization": "bearer hush"})).status_code == 200


async def test_without_a_token_loopback_by_its_own_names_only() -> None:
    async with running_gateway(ENGINE) as gateway:
        assert (await gateway.client.get("/admin/engines")).status_code == 200
        for path in ("/admin/engines", "/metrics", "/v1/models", "/dashboard"):
            assert (await gateway.client.get(path, headers={"host": "localhost:8080"})).status_code == 200
            for name in ("evil.example", "127.evil.com", "127.0.0.1.nip.io", "[::1", "localhost:abc", "a b"):
                rebound = await gateway.client.get(path, headers={"host": name})
                assert rebound.status_code == 403, (path, name)
                assert "loopback" in rebound.json()["error"]["message"]


async def test_beyond_loopback_a_token_is_needed() -> None:
    async with running_gateway(ENGINE, host="0.0.0.0") as gateway:
        refused = await gateway.client.get("/admin/engines")
        assert refused.status_code == 403
        assert "TOKENFLOW_ADMIN_TOKEN" in refused.json()["error"]["message"]


async def test_the_dashboard_is_served_and_the_root_leads_to_it() -> None:
    async with running_gateway(ENGINE) as gateway:
        root = await gateway.client.get("/")
        assert root.headers["location"] == "/dashboard"
        page = await gateway.client.get("/dashboard")
        assert page.status_code == 200
        assert page.headers["content-security-policy"].startswith("default-src 'self'")
