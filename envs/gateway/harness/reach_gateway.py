"""Runs in a sandbox without a network: there 127.0.0.1:PORT leads to the gateway, through a socket of the host, and
nowhere else.

    python -IS reach_gateway.py PORT PROGRAM [ARGUMENT ...]

A child passes bytes on; this process becomes the program. The child ends with the sandbox.
"""

import asyncio
import os
import socket
import sys
from contextlib import suppress

GATE = "/run/gateway"
_CHUNK_BYTES = 1 << 16


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        there, back = await asyncio.open_unix_connection(GATE)
    except OSError:
        writer.close()
        return
    await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))


async def _relay(listener: socket.socket) -> None:
    async with await asyncio.start_server(_serve, sock=listener) as server:
        await server.serve_forever()


def main() -> None:
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128)
    if os.fork() == 0:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        asyncio.run(_relay(listener))
        os._exit(0)

    listener.close()
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")


if __name__ == "__main__":
    main()
