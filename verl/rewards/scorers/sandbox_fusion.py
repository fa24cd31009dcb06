"""Programs run by a SandboxFusion server: a client of its `run_code` call, which is JSON over HTTP.

https://bytedance.github.io/SandboxFusion
"""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.config import SandboxFusionConfig
from verl.rewards.sandbox import Limits, ProgramResult, SandboxError
from verl.rewards.sandbox.inside import program
from verl.utils.errors import ConfigError

COMPILE_S = 10
WAITS_S = (1.0, 2.0, 4.0)  # before each further attempt
_BUSY = (429, 502, 503, 504)


class ServerLimit(threading.Semaphore):
    """At most `most` programs of this process at once on the server; a copy in another process counts anew."""

    def __init__(self, most: int):
        super().__init__(most)
        self._most = most

    def __reduce__(self) -> tuple[Any, ...]:
        return ServerLimit, (self._most,)


def sandbox_arguments(config: SandboxFusionConfig) -> dict[str, Any]:
    """The arguments of `default_compute_score` that `reward.sandbox_fusion` describes; ConfigError for its address."""
    if config.url is None:
        return {"memory_limit_mb": config.memory_limit_mb}
    check_address(config.url)
    return {
        "sandbox_fusion_url": config.url, "memory_limit_mb": config.memory_limit_mb,
        "concurrent_semaphore": ServerLimit(config.max_concurrent),
    }  # fmt: skip


def check_address(url: str) -> None:
    """ConfigError where it is no address of a server."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"reward.sandbox_fusion.url={url!r}; expected http(s)://host:port/run_code")


def run_on_server(url: str, request: Mapping[str, Any], stdin: bytes, limits: Limits) -> ProgramResult:
    """The result of a request {source} or {source, call}; SandboxError where four attempts give none."""
    check_address(url)
    body = {
        "code": _script(request), "stdin": stdin.decode(errors="replace"), "language": "python", "files": {},
        "fetch_files": [], "compile_timeout": COMPILE_S, "run_timeout": limits.cpu_s,
        "memory_limit_MB": limits.memory_mb,
    }  # fmt: skip
    for wait_s in (*WAITS_S, None):
        try:
            received = _post(url, body, limits)
            if len(received) >= 8 * limits.output_bytes:  # cut off, and no JSON any more
                return ProgramResult(b"", b"", "output", 1, 0.0)
            return _read(_json(url, received), limits)
        except SandboxError as error:
            if wait_s is None or not error.__cause__:
                raise
        time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def _script(request: Mapping[str, Any]) -> str:
    """The program itself; for a function the runner of our own sandbox with the program and the call as data."""
    if "call" not in request:
        return request["source"]
    runner = Path(program.__file__).read_text(encoding="utf-8")
    return f"{runner}\n\nrun(json.loads({json.dumps(dict(request))!r}))\n"


def _post(url: str, body: Mapping[str, Any], limits: Limits) -> bytes:
    data = json.dumps(body).encode()
    post = urllib.request.Request(url, data, {"Content-Type": "application/json", "Accept": "application/json"})
    try:
        with urllib.request.urlopen(post, timeout=COMPILE_S + limits.wall_s) as answer:
            return bytes(answer.read(8 * limits.output_bytes))
    except urllib.error.HTTPError as error:
        cause = error if error.code in _BUSY else None
        raise SandboxError(f"the sandbox server {url} answered {error.code} {error.reason}") from cause
    except (OSError, http.client.HTTPException) as error:  # no connection, no answer in time, or half of one
        raise SandboxError(f"the sandbox server {url} cannot be reached: {error}") from error


def _json(url: str, received: bytes) -> Any:
    try:
        return json.loads(received)
    except (ValueError, RecursionError) as error:
        raise SandboxError(f"the sandbox server {url} answered no JSON: {received[:80]!r}") from error


def _read(answer: Any, limits: Limits) -> ProgramResult:
    """The fields of a RunCodeResponse; the run may be missing where the program did not compile."""
    if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
        shown = str(answer)[:200]
        raise SandboxError(f"the sandbox server could not run the program: {shown}") from ConnectionError(shown)
    run = answer.get("run_result") or {"status": "Error", **(answer.get("compile_result") or {}), "return_code": 1}
    stdout, stderr = ((run.get(name) or "").encode(errors="surrogatepass") for name in ("stdout", "stderr"))
    ending = "wall" if run.get("status") == "TimeLimitExceeded" else "exit"
    if len(stdout) + len(stderr) > limits.output_bytes:
        ending, stdout, stderr = "output", stdout[: limits.output_bytes], stderr[: limits.output_bytes]
    code = run.get("return_code")
    return ProgramResult(
        stdout, stderr, ending, 1 if code is None else int(code), float(run.get("execution_time") or 0)
    )
