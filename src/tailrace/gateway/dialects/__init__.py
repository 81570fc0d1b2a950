"""How agents speak to models over HTTP: each dialect reads a request, and writes a reply, its events and its errors."""
