"""What a process is told of a file that ends its right to write; `lt2_platform.storage` looks for it before each write.

Imports nothing, so that whatever starts processes can pass it on.
"""

FENCE = "LT2_FENCE"
"""The environment variable with the file's full path. Once it exists, another process has taken over the work."""


class OvertakenError(RuntimeError):
    """The fence is there: nothing that this process writes may be seen any more, but for its own log."""
