"""A dispatcher whose process dies, as by a crash of its interpreter, when it sends a line that says so."""

from __future__ import annotations

import os

from dispatcher.__main__ import app
from dispatcher.send import Sender

STATUS = 9
_send = Sender.send


async def _send_or_die(sender, url, path, body, **how):
    if b"killer" in body:
        os._exit(STATUS)
    return await _send(sender, url, path, body, **how)


if __name__ == "__main__":
    Sender.send = _send_or_die
    app()
