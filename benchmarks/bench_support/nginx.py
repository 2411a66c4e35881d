"""Owns an nginx on loopback that keeps what is put: the smallest server that a shared cache can be on.

Knows nothing of what is kept there.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
"""Path of the program; None where it is not installed (apt-get install nginx-light)."""
_CONFIGURATION = """\
daemon off; master_process off; pid {root}/pid; error_log {root}/errors;
events {{ worker_connections 256; }}
http {{
  access_log {root}/requests;
  client_body_temp_path {root}/parts; proxy_temp_path {root}/unused1; fastcgi_temp_path {root}/unused2;
  uwsgi_temp_path {root}/unused3; scgi_temp_path {root}/unused4;
  client_max_body_size 256m;
  keepalive_requests 100000;
  server {{
    listen 127.0.0.1:{port};
    location / {{ root {root}/served; dav_methods PUT; create_full_put_path on; }}
  }}
}}
"""


@contextlib.contextmanager
def serving_nginx(root: Path) -> Iterator[str]:
    """Provide the URL of an nginx that keeps what is put into `root/served`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    (root / "served").mkdir(parents=True)
    root.chmod(0o755)
    (root / "nginx.conf").write_text(_CONFIGURATION.format(root=root, port=port), encoding="utf-8")
    assert NGINX, "nginx is installed"
    with subprocess.Popen([NGINX, "-p", str(root), "-c", str(root / "nginx.conf")], stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait_for(port: int) -> None:
    for _ in range(500):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)
    raise TimeoutError("nginx does not start")
