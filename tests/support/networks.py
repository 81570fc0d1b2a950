"""What a test needs of this machine's network."""

from __future__ import annotations

import socket

import pytest

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 that takes IPv4's connections")
