"""Addresses of servers as people see them, in logs, errors and pages."""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=//)[^/]*@")


def without_user(url: str) -> str:
    """The address without what may be a key: user and password, and the query.

    >>> without_user("https://me:secret@host:8000/v1?api_key=secret"), without_user("redis://[::1]/0")
    ('https://host:8000/v1', 'redis://[::1]/0')
    """
    return _USER.sub("", url, count=1).partition("?")[0]
