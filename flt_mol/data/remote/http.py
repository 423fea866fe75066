"""One file from a web server, whatever happens to the connection, and only if it is the right one.

Bytes are kept in `NAME.part` and continued from there, by a later run as well.
"""

from __future__ import annotations

import re
import ssl
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError

import flt_mol
from flt_mol.data.remote.part import Part, Progress

__all__ = ["Progress", "fetch"]

_CHUNK = 2**20
_LONGEST_WAIT = 60.0  # seconds
_LATER = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses of troubles that pass


class _AgainError(Exception):
    """This attempt failed; another may not."""


@dataclass(frozen=True)
class _Policy:
    wait: float
    attempts: int
    timeout: float


def fetch(
    url: str,
    target: Path,
    *,
    size: int,
    md5: str,
    wait: float = 1.0,
    attempts: int = 6,
    timeout: float = 60.0,
    progress: Progress | None = None,
) -> int:
    """Download a file of known size and md5; `target` appears when it is whole and right.

    Proxies are taken from the environment, as :mod:`urllib.request` does. Lost connections, servers
    that are busy, and other answers than expected are tried again; what has come is kept.

    Args:
        url: http or https.
        target: file to make; its folder must exist. `target.part` is continued where it is there.
        size: bytes.
        md5: hexadecimal.
        wait: seconds before the second attempt, doubled for each further one without progress.
        attempts: without progress, until it is given up.
        timeout: seconds without a byte after which a connection counts as lost.
        progress: called with bytes.

    Returns:
        Bytes that came over the network in this run.

    Raises:
        ValueError: no http(s) URL; a server that cannot be reached, refuses, or gives another file;
            a full disk. Says how to fetch by hand.
    """
    if not _is_web(url):
        raise ValueError(f"{url} is no http:// or https:// address")
    policy = _Policy(wait, attempts, timeout)
    part = Part(url, target, size, progress)
    found = ""
    with part:
        part.resume()
        for _ in range(2):
            _complete(part, policy)
            found = part.md5.hexdigest()
            if found == md5:
                part.finish()
                return part.received
            part.restart(None)
    part.remove()
    raise ValueError(
        f"{url} is not the file that was expected: md5 {found}, expected {md5}, in two downloads; "
        f"it has changed on the server, or is damaged on the way. {_by_hand(part)}"
    )


def _complete(part: Part, policy: _Policy) -> None:
    """Attempt until all bytes are there, or several attempts in a row brought nothing new."""
    failures, furthest = 0, 0
    # A server that does not answer is not to be waited for in silence.
    part.show("fetch", always=part.done < part.size)
    while part.done < part.size:
        try:
            _attempt(part, policy.timeout)
            reason = "the connection was closed early"
        except _AgainError as error:
            reason = str(error)
        if part.done >= part.size:
            break
        # A server that begins anew each time makes no progress until it gets further than before.
        failures = 0 if part.done > furthest else failures + 1
        furthest = max(furthest, part.done)
        if failures >= policy.attempts:
            raise ValueError(
                f"cannot fetch {part.url}: {reason} ({failures} attempts without progress; "
                f"{part.done:,} of {part.size:,} bytes are there, and kept). {_by_hand(part)}"
            )
        seconds = min(policy.wait * 2 ** max(failures - 1, 0), _LONGEST_WAIT)
        part.show("fetch", f" (once more in {seconds:g} s: {reason})", always=True)
        time.sleep(seconds)


def _attempt(part: Part, timeout: float) -> None:
    """One request, and all that comes of it."""
    try:
        with _opener().open(_request(part), timeout=timeout) as response:
            _check_answer(part, response)
            # read1 hands over what has come, so that a lost connection loses nothing.
            while part.done < part.size and (
                chunk := response.read1(min(_CHUNK, part.size - part.done))
            ):
                part.write(chunk)
    except HTTPError as error:
        error.close()
        raise _refusal(part, error) from error
    except (OSError, HTTPException) as error:
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise ValueError(
                f"cannot fetch {part.url}: the server cannot prove that it is the one it says "
                f"({cause.verify_message}). {_by_hand(part)}"
            ) from error
        raise _AgainError(_reason(cause)) from error


def _request(part: Part) -> urllib.request.Request:
    headers = {"User-Agent": f"flt_mol/{flt_mol.__version__}", "Accept-Encoding": "identity"}
    if part.done:
        headers["Range"] = f"bytes={part.done}-"
        if validator := part.version.get("validator"):
            headers["If-Range"] = validator
    return urllib.request.Request(part.url, headers=headers)


def _check_answer(part: Part, response: Any) -> None:
    """Whether what follows is the file, and from where on; makes `part` ready for it."""
    headers = response.headers
    if response.status == 206:
        start, total = _content_range(headers)
        if start != part.done or not part.same_version(headers):
            part.restart(None)
            raise _AgainError(
                "the file has changed on the server"
                if start == part.done
                else "the server sent another part of the file than was asked for"
            )
    elif response.status == 200:
        total = int(headers["Content-Length"]) if _is_number(headers["Content-Length"]) else None
        if total in (None, part.size):
            part.restart(headers)
    else:
        raise _AgainError(f"the server answered with status {response.status}")
    if total not in (None, part.size):
        raise _AgainError(
            f"the server has {total:,} bytes, expected are {part.size:,}: the file has changed "
            "there, or a login page answers in its place"
        )


def _refusal(part: Part, error: HTTPError) -> Exception:
    text = f"{error.code} {error.reason}"
    if error.code == 416:
        part.restart(None)
        return _AgainError(f"the server cannot continue the file ({text})")
    if error.code in _LATER:
        return _AgainError(f"the server answered {text}")
    return ValueError(f"cannot fetch {part.url}: the server answered {text}. {_by_hand(part)}")


def _content_range(headers: HTTPMessage) -> tuple[int | None, int | None]:
    """First byte and total of a `Content-Range`, as far as it says."""
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers["Content-Range"] or "")
    if found is None:
        return None, None
    return int(found[1]), int(found[2]) if _is_number(found[2]) else None


def _is_web(url: str) -> bool:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _is_number(text: str | None) -> bool:
    return text is not None and text.isascii() and text.isdigit()


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to http and https only."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """The request to make instead."""
        if not _is_web(newurl):
            raise ValueError(f"{req.full_url} leads to {newurl}, which is no http(s) address")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """Without the handlers of file:, ftp: and data: that urllib would add."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    return opener


def _reason(cause: object) -> str:
    if isinstance(cause, TimeoutError):
        return "nothing came for too long"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause) or type(cause).__name__


def _by_hand(part: Part) -> str:
    return (
        f"By hand: get {part.url} in a browser or on another machine, put it at {part.target}, and "
        "run the same command again"
    )
