"""`python -m lt2_dashboards --storage ROOT`: what `lt2 dashboard` starts in a process of its own."""

from __future__ import annotations

import argparse
import sys

from lt2.config import ConfigError
from lt2_dashboards.app import serve
from lt2_platform.storage import Storage


def main(arguments: list[str] | None = None) -> int:
    """Serve until interrupted. A mistake of the user is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="lt2 dashboard", description="Serve the results under a storage root.")
    parser.add_argument("--storage", help="folder or s3://bucket/prefix (default: $LT2_STORAGE, else ./lt2-storage)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port (default: 8787, or a free one if it is taken)")
    parser.add_argument("--no-auth", action="store_true", help="no login; on loopback only")
    parser.add_argument("--token-file", help="where to keep the login token")
    parser.add_argument(
        "--trusted-proxy", action="append", default=[], metavar="IP", help="proxy that authenticates users"
    )
    parser.add_argument("--proxy-header", default="x-forwarded-user", help="header with the user's name")
    given = parser.parse_args(arguments)
    try:
        _say_what_is_missing(Storage(given.storage))
        serve(
            given.storage,
            given.host,
            given.port,
            auth="none" if given.no_auth else "token",
            token_file=given.token_file,
            trusted_proxies=tuple(given.trusted_proxy),
            proxy_header=given.proxy_header,
            announce=lambda address: print(f"dashboard: {address}", flush=True),
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


def _say_what_is_missing(storage: Storage) -> None:
    """On stderr; not more, since a dashboard may be there before the store is, and shows it once it comes."""
    try:
        storage.check_readable()
    except ConfigError as error:
        print(f"dashboard: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
