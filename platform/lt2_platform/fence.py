"""The fence: a file that, once it exists, forbids a process to write, because another has taken over its work.

The process knows the file by an environment variable; `lt2_platform.storage` looks for it before each write. This
module imports nothing, so that whatever starts processes can pass the variable on.
"""

FENCE = "LT2_FENCE"
"""The environment variable with the file's full path."""


class OvertakenError(RuntimeError):
    """The fence is there: nothing that this process writes may be seen any more, but for its own log."""
