"""A server that stores chunks and says which ones LMCache would have been told are safe.

``python restart_child.py CONFIG FIRST COUNT``: prints ``ack N`` for each, then waits. SIGTERM
closes the adapter, as LMCache's server does.
"""

import contextlib
import signal
import sys
from pathlib import Path

from support.l2 import CHUNK_BYTES, key, memory_obj, opened, payload


class TerminatedError(Exception):
    """SIGTERM came."""


def _terminated(*_: object) -> None:
    raise TerminatedError


def main() -> None:
    signal.signal(signal.SIGTERM, _terminated)
    config, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with contextlib.suppress(TerminatedError), opened(config) as client:
        tasks = {
            client.adapter.submit_store_task(
                [key(number)], [memory_obj(payload(number, CHUNK_BYTES))]
            ): number
            for number in range(first, first + count)
        }
        while tasks:
            client.wait(client.adapter.get_store_event_fd())
            for task, result in client.adapter.pop_completed_store_tasks().items():
                number = tasks.pop(task)
                if result.is_successful():
                    print("ack", number, flush=True)
        print("done", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
