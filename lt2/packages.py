"""Which packages are installed here; this one need not be, a checkout on the path does."""

from importlib import metadata


def version_of(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
