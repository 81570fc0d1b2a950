"""What Redis refuses is told in one sentence before anything begins."""

from __future__ import annotations

import socket

import pytest

from tailrace.errors import NotAnswering, SettingsError
from tailrace.transport.redis import connection
from tailrace.transport.redis.connection import PASSWORD_VARIABLE, RedisConnection, require_redis, with_password
from tailrace.transport.redis.server import RedisServer
from tests.support.redis_servers import ask, needs_redis

pytestmark = needs_redis


def without_password(server: RedisServer) -> str:
    return f"redis://{server.url.rpartition('@')[2]}"


def test_a_server_of_our_own_answers_on_loopback_with_its_password_alone(server: RedisServer) -> None:
    require_redis(server.url)
    assert ask(server, "CONFIG", "GET", "bind") == [b"bind", b"127.0.0.1"]
    with pytest.raises(SettingsError, match=r"Authentication required|refuses this user or password"):
        require_redis(without_password(server))


def test_a_wrong_password_is_refused_and_not_shown(server: RedisServer) -> None:
    with pytest.raises(SettingsError, match="refuses this user or password") as refused:
        require_redis(without_password(server).replace("//", "//:wrong@"))
    assert "wrong" not in str(refused.value)
    assert refused.value.key == ("transport", "redis", "url")


def test_a_user_of_the_access_lists_comes_from_the_url_and_needs_its_rights(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "p@ss")
    ask(server, "ACL", "SETUSER", "trainer", "on", ">p@ss", "~tailrace:*", "+@all")
    ask(server, "ACL", "SETUSER", "guest", "on", ">p@ss", "~tailrace:*", "+ping")
    require_redis(with_password(without_password(server).replace("//", "//trainer@")))
    with pytest.raises(SettingsError, match="refuses this user or password"):
        require_redis(with_password(without_password(server).replace("//", "//guest@")))


def test_tls_with_a_server_that_speaks_none_is_refused(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_S", 0.5)
    with pytest.raises(SettingsError, match="by rediss://"):
        require_redis(server.url.replace("redis:", "rediss:"))


def test_nobody_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_S", 0.5)
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{unheard.getsockname()[1]}"
        with pytest.raises(NotAnswering, match=r"no Redis answers at redis://127\.0\.0\.1:"):
            require_redis(url)


def test_one_that_removes_what_it_likes_is_refused(server: RedisServer) -> None:
    ask(server, "CONFIG", "SET", "maxmemory", "100mb")
    ask(server, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(SettingsError, match="set it to noeviction"):
        require_redis(server.url)


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "redis://localhost:port"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match=r"transport\.redis\.url is no address"):
        RedisConnection(url)
