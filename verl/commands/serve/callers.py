"""Who may ask: no page of another site through somebody's browser, and for some paths this machine alone."""

from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from verl.commands.serve.request_body import RequestError


def check_origin(request: web.Request, listens_on: str) -> None:
    """RequestError for what a web page of somebody else may make a browser send to this server.

    Such a page can have a name of its own point here (then the Host is that name), or send a form or a plain text to
    our address (then the Origin is its own, and the body is no JSON).
    """
    host, origin = request.headers.get("Host"), request.headers.get("Origin")
    name, port = _name_and_port(f"//{host}")
    known = name and name in ("localhost", listens_on.lower())
    if host is not None and not known and not _is_address(name):
        raise RequestError(
            f"the Host {host!r:.80} is neither an address, localhost nor the --host of this server; ask it by its "
            "address, or start it with that name as --host", status=403, code="forbidden",
        )  # fmt: skip
    if origin is not None:
        theirs, their_port = _name_and_port(origin)
        near = all(n == "localhost" or (_is_address(n) and ip_address(n).is_loopback) for n in (theirs, name))
        if their_port != port or not (theirs == name or near):
            text = f"the Origin {origin!r:.80} is another site; this server answers no pages of others"
            raise RequestError(text, status=403, code="forbidden")
    if request.method == "POST" and request.content_type != "application/json":
        text = f"the Content-Type is {request.content_type!r:.80}; send application/json"
        raise RequestError(text, status=415)


def _name_and_port(url: str) -> tuple[str, int | None]:
    """Host and port of a URL; an empty name where it has none or cannot be read."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme or "http")
        return ("" if "@" in parts.netloc else parts.hostname or ""), port
    except ValueError:
        return "", None


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False


def check_is_near(request: web.Request) -> None:
    """RequestError for one of another machine: who lets the server sleep has started it."""
    peer, own = str(request.remote), request.get_extra_info("sockname", ("",))[0]
    if peer != own and not ip_address(peer).is_loopback:
        text = f"{request.path} is answered on the server's machine alone, and {peer} is another"
        raise RequestError(text, status=403, code="forbidden")
