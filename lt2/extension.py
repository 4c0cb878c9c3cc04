"""Configs of which users may add kinds of their own, in one file, without touching LT2: mixers, objectives, tasks.

A kind is a config class with a new literal `type`, and the class or function its `module` names. A config that gives
that file as `source` ("path/to/file.py") has it imported when the config is read, so that a record replays wherever the
file is. Importable without torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import traceback
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

SHIPPED = ("lt2.", "lt2_platform.", "lt2_workflows.")
THEIRS = "lt2_user_"
"""How the names of modules begin that are users' files."""


class ConfigError(ValueError):
    """A mistake in what the user asked for; its message is one line naming the thing and the fix."""


class Config(BaseModel):
    """Base of every configuration in LT2: frozen, and a typo is an error rather than an ignored key.

    Numbers are finite: JSON has no other, so a record of one could not be read back.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Extension(Config):
    """A config with kinds. A direct base names its `noun` and opens a registry; subclasses with a `type` join it.

    `module` is "package.module:name", or just "name" for something in the file of the config class itself.
    """

    noun: ClassVar[str]
    kinds: ClassVar[dict[str, type[Self]]]
    module: ClassVar[str]

    type: str
    source: str | None = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "noun" in cls.__dict__:
            cls.kinds = {}
            return
        name = cls.model_fields["type"].default
        if not isinstance(name, str):
            return
        known = cls.kinds.get(name)
        if known is not None and known.__module__.startswith(SHIPPED) and known.__module__ != cls.__module__:
            raise ConfigError(
                f"{cls.noun} type {name!r} of {cls.__name__} is a shipped one; give your {cls.noun} another type"
            )
        cls.kinds[name] = cls

    @classmethod
    def read(cls, value: Any) -> Any:
        """The config of the kind that a dict's `type` names; anything but a dict is returned as it is.

        With a `source` it is that file's, also where another file has a kind of this name.
        """
        if not isinstance(value, dict):
            return value
        name = value.get("type")
        own = vars(load_source(value["source"])).values() if value.get("source") else ()
        kinds = cls.kinds | {
            each.model_fields["type"].default: each for each in own if isinstance(each, type) and issubclass(each, cls)
        }
        kind = kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            if unspaced := next((key for key in value if str(key).startswith("type:")), None):
                raise ValueError(f"{unspaced!r} is one key; write a space after its colon, {{type: {unspaced[5:]}}}")
            near = get_close_matches(str(name), cls.kinds, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            if value.get("source"):
                own = f"{value['source']} defines no such {cls.noun}"
            else:
                own = "one of your own also needs its file, as source"
            known = ", ".join(sorted(cls.kinds))
            raise ValueError(f"unknown {cls.noun} type {name!r}{hint} (known: {known}; {own})")
        found = kind.model_validate(value)
        if value.get("source") and hasattr(found, "module"):
            found.implementation()  # a wrong name shows here, not in a worker hours later
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A config from a user's file is pickled as data: another process cannot import its class by name."""
        if not self.source:
            return super().__reduce_ex__(protocol)
        base = next(cls for cls in type(self).__mro__ if "noun" in cls.__dict__)
        return base.read, (self.model_dump(),)  # pyright: ignore[reportAttributeAccessIssue]

    def implementation(self) -> Any:
        """What `module` names: the class or function that does the work. Raises ConfigError if nothing is there."""
        cls = type(self)
        if not hasattr(cls, "module"):
            raise ConfigError(f"{cls.__name__} has no `module`: the name of the class or function that does the work")
        module, _, name = self.module.partition(":")
        home = importlib.import_module(module) if name else sys.modules[cls.__module__]
        found = getattr(home, name or module, None)
        if found is None:
            raise ConfigError(
                f"{cls.__name__} names {name or module!r} as its `module`, but {home.__file__} defines no such thing"
            )
        return found


_loading = threading.RLock()


def load_source(path: str) -> ModuleType:
    """A user's Python file as a module, imported once, under a name derived from its absolute path."""
    with _loading:  # while one thread imports it, another must not find it half defined
        return _load_source(path)


def _load_source(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        place = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(f"source {path!r} does not exist{place}; give the path of the Python file that defines it")
    name = THEIRS + "_".join(file.with_suffix("").parts[1:])
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ModuleNotFoundError) and (file.parent / f"{error.name}.py").is_file():
            raise ConfigError(
                f"{path} imports {error.name!r}, which lies beside it; each file is read on its own, here and by "
                f"workers: where a config of {error.name}.py is meant, give that file as its source, else install it "
                "or put its folder on PYTHONPATH"
            ) from None
        if isinstance(error, ImportError | SyntaxError):
            raise ConfigError(_not_imported(path, file, error)) from error
        raise
    return module


def _not_imported(path: str, file: Path, error: ImportError | SyntaxError) -> str:
    """Which line of a user's file, or of what it imports, fails to import what."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {error.msg}; it is not valid Python"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    own = [place for place, frame in enumerate(frames) if frame.filename == str(file)]
    *_, last = frames[own[-1] :]
    beyond = "" if last is frames[own[-1]] else f" (in {last.filename}:{last.lineno})"
    return f"{path}:{frames[own[-1]].lineno}: {error}{beyond}; correct the import, or install what it needs"


def in_their_file(error: Exception) -> TracebackType | None:
    """The part of an error's traceback that begins in a user's file; None where there is none."""
    found = error.__traceback__
    while found is not None and not found.tb_frame.f_globals.get("__name__", "").startswith(THEIRS):
        found = found.tb_next
    return found
