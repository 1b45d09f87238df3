"""Servers that are started, and servers that run already."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from megatron_gvpo.config.facts import Facts, Problem, doubtful, wrong
from megatron_gvpo.config.schema import ServersSection


def problems(facts: Facts) -> Iterator[Problem]:
    config = facts.config
    yield from _servers(config.rollout.servers, "rollout.servers")
    if not facts.has_teacher:
        return
    for key, source in facts.teachers.items():
        if config.teacher.where == "served":
            yield from _servers(source.servers, f"{key}.servers")
            if source.servers.launch == "local" and not source.path:
                yield wrong("a teacher server is started from a folder: name it", f"{key}.path")
        elif source.servers.urls:
            yield doubtful("a colocated teacher asks no server", f"{key}.servers.urls")


def _servers(servers: ServersSection, key: str) -> Iterator[Problem]:
    if servers.launch == "none" and not servers.urls and not servers.registry:
        yield wrong("launch: none needs the servers' urls", f"{key}.urls", f"{key}.launch")
    if servers.registry and (servers.urls or servers.launch == "local"):
        yield wrong("servers that register themselves are used with launch: none and no urls", f"{key}.registry")
    if servers.registry and not servers.nodes:
        yield wrong("how many machines register their servers?", f"{key}.nodes", f"{key}.registry")
    if servers.launch == "local" and servers.urls:
        yield wrong(
            "servers that run already are used with launch: none; this run starts its own", f"{key}.launch", f"{key}.urls"
        )
    for index, url in enumerate(servers.urls):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield wrong(f"must be http://HOST:PORT, got {url!r}", f"{key}.urls")
        elif url.rstrip("/") in (other.rstrip("/") for other in servers.urls[:index]):
            yield wrong(f"{url} is named twice", f"{key}.urls")
