"""A Hugging Face hub on this machine, as far as uploads and downloads of small files need one."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeHub:
    """Keeps repositories in memory: `files` of each, and whether it is private."""

    def __init__(self):
        self.files, self.private, self.commits, self.fails, self.url = {}, {}, 0, None, ""
        self.commit = "1" * 40

    def content(self, path):
        """Return the file that a path such as /me/gates/resolve/main/config.json names; None: there is none."""
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            return self.files.get(found[1], {}).get(found[2])
        return None

    def answer(self, method, path, body):
        """Return the status and the JSON of a request."""
        if self.fails is not None:
            return self.fails
        kind, _, place = path.removeprefix("/api/").partition("/")
        if path == "/api/repos/create":
            values = json.loads(body)
            name = f"{values['organization']}/{values['name']}"
            known = name in self.files
            if not known:
                self.files[name], self.private[name] = {}, values.get("visibility") == "private"
            return 409 if known else 200, {"url": f"{self.url}/{name}", "name": name}
        if kind == "validate-yaml":
            return 200, {"warnings": [], "errors": []}
        name, action = "/".join(place.split("/")[:2]), "/".join(place.split("/")[2:])
        if name not in self.files:
            return 404, {"error": path}
        files = self.files[name]
        if action == "preupload/main":
            asked = [file["path"] for file in json.loads(body)["files"]]
            found = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in asked]
            return 200, {"files": [file | {"oid": blob(files[file["path"]])} for file in found if file["path"] in files]
                         + [file | {"oid": None} for file in found if file["path"] not in files]}  # fmt: skip
        if action == "commit/main":
            self.commits += 1
            for operation in map(json.loads, body.splitlines()):
                if operation["key"] == "file":
                    files[operation["value"]["path"]] = base64.b64decode(operation["value"]["content"])
                elif operation["key"] == "deletedFile":
                    del files[operation["value"]["path"]]
            return 200, {
                "success": True,
                "commitOid": self.commit,
                "commitUrl": f"{self.url}/{name}/commit/{self.commit}",
            }
        if action.startswith("tree/"):
            return 200, [
                {"type": "file", "path": path, "size": len(files[path]), "oid": blob(files[path])} for path in files
            ]
        if method == "GET":
            about = {
                "id": name,
                "sha": self.commit,
                "private": self.private[name],
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
            return 200, about | {"siblings": [{"rfilename": path} for path in files]}
        return 404, {"error": path}


def blob(content):
    """Return git's hash of a file."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@contextlib.contextmanager
def serving():
    """Serve a hub until the context ends."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET(is_head=True)

        def do_GET(self, is_head=False):
            if (content := hub.content(self.path.split("?")[0])) is None:
                return self.do_POST()
            self.send_response(200)
            for name, value in (
                ("Content-Length", len(content)), ("ETag", f'"{blob(content)}"'), ("X-Repo-Commit", hub.commit)
            ):  # fmt: skip
                self.send_header(name, str(value))
            self.end_headers()
            if not is_head:
                self.wfile.write(content)

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, values = hub.answer(self.command, self.path.split("?")[0], body)
            content = json.dumps(values).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            hub.url = f"http://127.0.0.1:{server.server_port}"
            yield hub
        finally:
            server.shutdown()
            thread.join()


def on_hub(hub, cache, monkeypatch):
    """Let this process take a hub for Hugging Face's, and keep copies of what it fetches in a folder of its own."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
