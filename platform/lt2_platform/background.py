"""One call at a time in a thread of its own, whose outcome is taken later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Background:
    """Runs `function` in a thread; `take` waits for it and gives what it gave, or raises what it raised."""

    def __init__(self, function: Callable[[], Any], name: str):
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def take(self) -> Any:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001  raised again by whoever takes the outcome
            self._error = error
