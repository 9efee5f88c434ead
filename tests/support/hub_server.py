"""Stand-in of the Hub's HTTP interface on localhost: repositories of models, commits of small and of large files, downloads."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_" + "t" * 34


class HubServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        """Contents of large files by their SHA-256, which a commit refers to."""
        self.requests: list[str] = []
        self.broken: str | None = None
        """Pattern of requests that are refused from now on, as when the storage of the owner is full."""
        self.silent: str | None = None
        """Pattern of requests that are never answered."""
        self.heard = threading.Event()
        """Set when such a request has come."""
        self.ends = threading.Event()


@contextmanager
def hub_server() -> Iterator[HubServer]:
    with HubServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.ends.set()
            server.shutdown()


class _Answer(BaseHTTPRequestHandler):
    server: HubServer

    def log_message(self, *arguments: Any) -> None: ...

    def _answer(self, code: int, body: Any = None, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _is_refused(self) -> bool:
        server, request = self.server, f"{self.command} {self.path}"
        server.requests.append(request)
        if server.silent and re.search(server.silent, request):
            server.heard.set()
            server.ends.wait()
            return True
        if server.broken and re.search(server.broken, request):
            self._answer(403, {"error": "storage limit reached"})
            return True
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and not self.path.startswith("/large/"):
            self._answer(
                401, {"error": "Invalid username or password."}, X_Error_Message="Invalid username or password."
            )
            return True
        return False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server, path = self.server, self.path.partition("?")[0]
        if self._is_refused():
            return
        if path == "/api/validate-yaml":
            front = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            wrong = [name for name in ("base_model", "license") if "/" in str(front.get(name, "")).removeprefix("org/")]
            errors = [{"message": f'"{name}" must be a name on the Hub'} for name in wrong]
            self._answer(400 if errors else 200, {"errors": errors, "warnings": []})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            code = 409 if name in server.private else 200
            if code == 200:
                server.private[name] = asked.get("private", asked.get("visibility") == "private")
                server.files[name] = {}
            self._answer(code, {"url": f"{server.url}/{name}", "name": name, "id": name})
        elif found := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            files = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                 "shouldIgnore": False} for file in json.loads(body)["files"]
            ]  # fmt: skip
            self._answer(200, {"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**file, "actions": {"upload": {"href": f"{server.url}/large/{file['oid']}"}}}
                for file in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            name, files = found[1], {}
            for line in body.decode().splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = server.large[value["oid"]]
            server.files[name] |= files
            self._answer(
                200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{server.url}/{name}/commit/{'0' * 40}"}
            )
        else:
            self._answer(404, {"error": f"no POST {path}"})

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._is_refused():
            return
        self.server.large[hashlib.sha256(body).hexdigest()] = body
        self._answer(200)

    def do_GET(self) -> None:
        if self._is_refused():
            return
        path = self.path.partition("?")[0]
        if (found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/main)?", path)) and found[
            1
        ] in self.server.files:
            siblings = [{"rfilename": name} for name in self.server.files[found[1]]]
            info = {
                "id": found[1],
                "private": self.server.private[found[1]],
                "sha": "0" * 40,
                "siblings": siblings,
                "tags": [],
            }
            self._answer(200, info)
        elif (found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)) and found[2] in self.server.files.get(
            found[1], {}
        ):
            data = self.server.files[found[1]][found[2]]
            tag = hashlib.sha1(data).hexdigest()
            self._answer(200, data, ETag=f'"{tag}"', X_Repo_Commit="0" * 40, X_Linked_Size=str(len(data)))
        else:
            self._answer(404, {"error": "not found"}, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET
