"""The trainer's end in a process of its own: `batch_process.py ADDRESS FOLDER BATCHES`; then it dies without a word."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tailrace.transport.batches.channels import ChannelBatchReceiver
from tailrace.transport.batches.stores import FileSource


async def main(address: str, folder: str, batches: int) -> None:
    receiver = ChannelBatchReceiver(address, FileSource(Path(folder), recycled=True))
    for _ in range(batches):
        batch = await receiver.receive()
        print(batch.summary.step, int(batch.token_ids.sum()), flush=True)
        await receiver.acknowledge(batch.summary.step)
    await receiver.receive()
    os._exit(9)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
