"""A generator in another process: its server, its client, their messages over ZeroMQ, the keys that protect them."""
