"""An OpenAI-compatible server that says what a test wants it to say."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class StubServer:
    """Serves on loopback; use as a context manager.

    `answer(request)` gets the request's JSON and returns an assistant message, a status
    code, or raw bytes. Runs in threads, so it may sleep.
    """

    def __init__(self, answer):
        self.requests = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self._send(200, b"{}")

            def do_POST(self):
                length = int(self.headers["Content-Length"])
                request = json.loads(self.rfile.read(length))
                stub.requests.append(request)
                made = answer(request)
                if isinstance(made, int):
                    body = json.dumps({"error": {"message": f"status {made}"}})
                    self._send(made, body.encode())
                elif isinstance(made, bytes):
                    self._send(500, made)
                else:
                    self._send(200, json.dumps(completion(made)).encode())

            def _send(self, status, body):
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:
                    pass  # the client has given up

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc):
        self._server.shutdown()
        self._server.server_close()


def completion(message):
    if isinstance(message, str):
        message = {"role": "assistant", "content": message}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "stub",
        "choices": [choice],
    }
