"""What lies in a stream: numbered messages of one writer, each one entry of two fields.

header   JSON: schema, run, epoch, number, kind, how many bytes, in how many parts, their checksum
data     the message's bytes; empty where they lie in parts, in keys of their own beside the stream

tailrace:RUN:EPOCH:batches-0:to          the stream
tailrace:RUN:EPOCH:batches-0:to:17.2     part 2 of message 17
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import xxhash

from tailrace.errors import CorruptData, OtherSchema
from tailrace.guards import guarded

SCHEMA = 1
"""Of headers, and of what their kinds mean. A reader of another schema refuses the entry."""
PART_BYTES = 1 << 20
"""What is longer is cut into parts of this length, so that no answer of Redis is longer."""
MAX_BYTES = 1 << 34
"""Of one message."""
_MAX_HEADER_BYTES = 4096
_MAX_PARTS = MAX_BYTES // PART_BYTES


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one entry."""

    schema: int
    run: str
    epoch: str
    number: int
    """Of the message among its writer's, from 1 and without gaps."""
    kind: str
    num_bytes: int
    num_parts: int
    """0: the bytes are in the entry itself."""
    xxh3: str


class _AnySchema(msgspec.Struct, frozen=True):
    """What headers of every schema have."""

    schema: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One message, read and checked."""

    id: bytes
    """Redis's own, of this copy of it."""
    number: int
    kind: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Message:
    """One message to be written, and kept until it is released."""

    number: int
    kind: str
    data: bytes | memoryview

    def header(self, run: str, epoch: str) -> bytes:
        """Its entry's; O(bytes)."""
        size = len(self.data)
        return msgspec.json.encode(
            Header(
                SCHEMA, run, epoch, self.number, self.kind, size, self.num_parts, xxhash.xxh3_64_hexdigest(self.data)
            )
        )

    @property
    def num_parts(self) -> int:
        """How many keys it takes beside the stream."""
        size = len(self.data)
        return 0 if size <= PART_BYTES else -(-size // PART_BYTES)

    def parts(self) -> list[memoryview]:
        """What lies in each of them."""
        whole = memoryview(self.data)
        return [whole[start : start + PART_BYTES] for start in range(0, self.num_parts * PART_BYTES, PART_BYTES)]


def part_key(stream: str, number: int, part: int) -> str:
    """Where one part of a message lies.

    >>> part_key("tailrace:run:batches:0", 17, 2)
    'tailrace:run:batches:0:17.2'
    """
    return f"{stream}:{number}.{part}"


def read_header(stream: str, fields: object) -> tuple[Header, bytes]:
    """An entry's header, and the data beside it. Raises `CorruptData`, `OtherSchema` for one of another schema."""
    if not isinstance(fields, list) or len(fields) != 4 or fields[0] != b"header" or fields[2] != b"data":
        raise CorruptData(f"an entry of the stream {stream} has not the fields header and data")
    header, data = fields[1], fields[3]
    with guarded(f"the header of an entry of the stream {stream}"):
        if len(header) > _MAX_HEADER_BYTES:
            raise CorruptData(f"the header of an entry of the stream {stream} has {len(header)} bytes")
        schema = msgspec.json.decode(header, type=_AnySchema).schema
        if schema != SCHEMA:
            relation = "newer" if schema > SCHEMA else "older"
            raise OtherSchema(
                f"an entry of the stream {stream} is of schema {schema}, {relation} than this Tailrace's {SCHEMA}: "
                "use the same version at both ends"
            )
        read = msgspec.json.decode(header, type=Header)
    if not (read.number > 0 and 0 <= read.num_parts <= _MAX_PARTS and 0 <= read.num_bytes <= MAX_BYTES):
        raise CorruptData(f"the header of an entry of the stream {stream} is impossible: {read}")
    return read, data


def checked(stream: str, header: Header, data: bytes) -> bytes:
    """The message's bytes. Raises `CorruptData` where they are not those that were written."""
    if len(data) != header.num_bytes or xxhash.xxh3_64_hexdigest(data) != header.xxh3:
        raise CorruptData(
            f"message {header.number} of the stream {stream} is damaged: {len(data)} bytes, of {header.num_bytes}, "
            "or its checksum differs"
        )
    return data
