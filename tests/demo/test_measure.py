import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

pytest.importorskip("httpx", reason="needs the httpx package (extra cpu or gpu)")

from demo.measure import (
    complete,
    parse_counts,
    server_counts,
    server_sent_events,
)

STATUS = {
    "storage_manager": {
        "l2_adapters": [{"is_healthy": True, "counts": {"read_bytes": 4096}}],
        "store_controller": {"pending_keys_count": 2, "in_flight_task_count": 1},
    }
}
METRICS = """\
# TYPE lmcache_mp_l2_store_completed_objects_chunks_total counter
lmcache_mp_l2_store_completed_objects_chunks_total{l2_name="plugin"} 116.0
# TYPE lmcache_mp_lookup_hit_l2_tokens_total counter
lmcache_mp_lookup_hit_l2_tokens_total{cache_salt="",model_name="a"} 256.0
lmcache_mp_lookup_hit_l2_tokens_total{cache_salt="",model_name="b"} 512.0
"""


class FakeServer(BaseHTTPRequestHandler):
    events: ClassVar[list[dict[str, Any]]] = []
    status: ClassVar[int] = 200
    requests: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.requests.append(json.loads(self.rfile.read(length)))
        lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in self.events]
        self.reply("".join([*lines, "data: [DONE]\n\n"]))

    def do_GET(self) -> None:
        self.reply(METRICS if self.path == "/metrics" else json.dumps(STATUS))

    def reply(self, body: str) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    FakeServer.events, FakeServer.status, FakeServer.requests = [], 200, []
    with HTTPServer(("127.0.0.1", 0), FakeServer) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def choice(*tokens: int, text: str = "x") -> dict[str, Any]:
    return {"choices": [{"text": text, "token_ids": list(tokens)}]}


def test_complete_collects_tokens_and_usage(server: str) -> None:
    usage = {"prompt_tokens": 300, "prompt_tokens_details": {"cached_tokens": 256}}
    FakeServer.events = [choice(5), choice(6, 7), {"choices": [], "usage": usage}]
    done = complete(server, "tiny", [1, 2, 3], 3)
    assert done.output_tokens == (5, 6, 7)
    assert (done.prompt_tokens, done.cached_tokens) == (300, 256)
    assert done.ttft_s > 0
    (request,) = FakeServer.requests
    assert request["prompt"] == [1, 2, 3]
    assert (request["max_tokens"], request["temperature"], request["stream"]) == (3, 0, True)


@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": None}])
def test_nothing_cached_is_zero(server: str, details: object) -> None:
    usage = {"prompt_tokens": 3, "prompt_tokens_details": details}
    FakeServer.events = [choice(5), {"choices": [], "usage": usage}]
    assert complete(server, "tiny", [1], 1).cached_tokens == 0


def test_complete_says_why_it_failed(server: str) -> None:
    with pytest.raises(RuntimeError, match="no token"):
        complete(server, "tiny", [1], 1)
    FakeServer.events = [{"error": {"message": "engine died"}}]
    with pytest.raises(RuntimeError, match="engine died"):
        complete(server, "tiny", [1], 1)
    FakeServer.status = 400
    with pytest.raises(RuntimeError, match="refused"):
        complete(server, "tiny", [1], 1)


def test_events_survive_any_cut_and_strange_line_ends() -> None:
    events = [choice(1, text="a\u2028b\x85c"), choice(2, text="ä")]
    stream = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
    stream = ": a comment\n" + stream + "data: [DONE]\n\n"
    raw = stream.encode()
    for size in (1, 2, 3, 7, len(raw)):
        pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
        assert list(server_sent_events(pieces)) == events


def test_counts_are_summed_over_labels(server: str) -> None:
    counts = server_counts(server)
    assert counts == parse_counts(STATUS, METRICS)
    assert counts.stored_chunks == 116
    assert counts.pending_stores == 3
    assert counts.hit_tokens == 768
    assert counts.read_bytes == 4096


def test_counts_without_an_adapter_and_before_the_first_event() -> None:
    idle = {"pending_keys_count": 0, "in_flight_task_count": 0}
    manager = {"l2_adapters": [], "store_controller": idle}
    counts = parse_counts({"storage_manager": manager}, "")
    assert (counts.stored_chunks, counts.pending_stores, counts.hit_tokens) == (0, 0, 0)
    assert counts.read_bytes is None


@pytest.mark.parametrize(("adapter", "expected"), [({"type": "fs"}, None), ({"counts": {}}, 0)])
def test_only_our_adapter_tells_the_bytes_read(adapter: dict[str, Any], expected: object) -> None:
    idle = {"pending_keys_count": 0, "in_flight_task_count": 0}
    manager = {"l2_adapters": [adapter], "store_controller": idle}
    assert parse_counts({"storage_manager": manager}, "").read_bytes == expected
