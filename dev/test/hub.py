# dev/test/hub.py - an HTTP server on loopback that stands in for the public addresses of data sets.
#
# It serves bytes from a dictionary, with ranges and version tags as real servers have them, lists
# folders as the hub does, remembers every request, and fails on purpose: one fault a request, in
# order.

import hashlib
import http.server
import json
import threading
from dataclasses import dataclass, field


@dataclass
class Fault:
    """What goes wrong in one request: another status, or the connection ends after some bytes."""

    status: int = 0
    cut_after: int = -1
    stall: bool = False  # after cut_after bytes: keep the connection open and send nothing


@dataclass
class Hub:
    files: dict = field(default_factory=dict)  # "/path": bytes
    types: dict = field(default_factory=dict)  # "/path": content type
    faults: dict = field(default_factory=dict)  # "/path": [Fault or None, ...], one per request
    wrong_sums: set = field(default_factory=set)  # paths whose listed checksum is a lie
    requests: list = field(default_factory=list)  # (path, range or None, bytes sent)

    def __enter__(self):
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.release = threading.Event()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.release.set()
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def add(self, repository, path, content):
        """A file of a data set, under the address that the hub would give it."""
        address = f"/datasets/{repository}/resolve/main/{path}"
        self.files[address] = content
        return address

    def listing(self, path):
        """/api/datasets/OWNER/NAME/tree/main[/FOLDER], as the hub answers it."""
        _, _, _, owner, name, _, _, *folder = path.split("/")
        prefix = f"/datasets/{owner}/{name}/resolve/main/" + "".join(part + "/" for part in folder)
        entries = []
        for address, content in self.files.items():
            if address.startswith(prefix) and "/" not in address[len(prefix) :]:
                checksum = hashlib.sha256(
                    b"other" if address in self.wrong_sums else content
                ).hexdigest()
                entries.append(
                    {
                        "type": "file",
                        "path": address.split("/resolve/main/")[1],
                        "size": len(content),
                        "oid": "0" * 40,
                        "lfs": {"oid": checksum, "size": len(content)},
                    }
                )
        return json.dumps(entries).encode()

    def sent(self, path):
        return [(asked, count) for name, asked, count in self.requests if name == path]


class _Handler(http.server.BaseHTTPRequestHandler):
    hub = None

    def log_message(self, *_):
        pass

    def do_GET(self):
        hub, path = self.hub, self.path
        fault = hub.faults[path].pop(0) if hub.faults.get(path) else None
        content = hub.listing(path) if path.startswith("/api/") else hub.files.get(path)
        if content is None or fault and fault.status:
            self.send_error(fault.status if fault else 404)
            hub.requests.append((path, self.headers.get("Range"), 0))
            return
        start, tag = 0, '"' + hashlib.sha256(content).hexdigest() + '"'
        if self.headers.get("Range") and self.headers.get("If-Range") == tag:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Type", hub.types.get(path, "application/octet-stream"))
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        body = content[start:]
        if fault:
            body = body[: fault.cut_after]
        hub.requests.append((path, self.headers.get("Range"), len(body)))
        self.wfile.write(body)
        if fault and fault.stall:
            self.wfile.flush()
            hub.release.wait(60)
