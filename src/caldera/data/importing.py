"""Custom objects, named by path and name in the configuration or registered under a name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pickle
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import cloudpickle

from caldera.errors import ConfigError, nearest
from caldera.registry import Registry
from caldera.storage import local_path
from caldera.storage.writing import written_aside

_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_CALDERA = Path(__file__).parents[1]


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of a traceback that are neither a library's nor Caldera's, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if _is_the_users(frame.filename)]


def _is_the_users(filename: str) -> bool:
    path = Path(filename)
    is_installed = {"site-packages", "dist-packages"} & set(path.parts)
    is_ours = path.is_relative_to(_STANDARD_LIBRARY) or path.is_relative_to(_CALDERA)
    return not (is_installed or is_ours or filename.startswith("<frozen"))


T = TypeVar("T")
_OURS = re.compile(r"^verl\.(?:experimental\.)?")


def load_object(path: str, name: str | None, key: str) -> Any:
    """The object `name` of a Python file or module.

    `path` is `/x/y.py`, the URL of such a file, `pkg://a.b.c`, or a file of `write_objects`; `key`
    is the configuration node that holds the path and the name, such as `data.custom_cls`.
    """
    module = load_module(path, key)
    defined = _defined_names(module)
    if not name:
        raise ConfigError(f"{key}: {path} is given without a name; it defines {_listed(defined)}")
    if not hasattr(module, name):
        guess = nearest(name, defined)
        hint = f" (did you mean {guess!r}?)" if guess else ""
        raise ConfigError(f"{key}: {path} has no {name!r}{hint}; it defines {_listed(defined)}")
    return getattr(module, name)


def named_function(named: str, key: str) -> Callable[..., Any]:
    """The function `path:name`."""
    path, _, name = str(named).rpartition(":")
    if not path:
        raise ConfigError(f"{key}={named!r}: takes path/to/file.py:function or pkg://a.b:function")
    function: Any = load_object(path, name, key)
    if not callable(function):
        raise ConfigError(f"{key}={named!r}: is no function")
    found: Callable[..., Any] = function
    return found


def load_class(dotted: str, base: type[T], key: str) -> type[T]:
    """The class `a.b.C`, or `file.py:C`, which must be derived from `base`.

    What files written for verl name after its own packages is here under the same names.
    """
    takes = (
        f"takes a class derived from {base.__qualname__} (of {base.__module__}), as "
        "my.module.MyClass or path/to/file.py:MyClass"
    )
    path, _, name = dotted.rpartition(":")
    if not path:
        module, _, name = dotted.rpartition(".")
        if not module or name == "py":
            raise ConfigError(f"{key}={dotted!r} names no class; {takes}")
        path = f"pkg://{_OURS.sub('caldera.', module)}"
    try:
        found = load_object(path, name, key)
    except ConfigError as error:
        raise ConfigError(f"{error}; {takes}") from error
    if not isinstance(found, type) or not issubclass(found, base):
        raise ConfigError(f"{key}={dotted!r} is no such class; {takes}")
    return found


def load_module(path: str, key: str) -> ModuleType:
    """The module of such a path. Whatever goes wrong in it is a mistake of the user's."""
    if path.startswith("pkg://"):
        return _import_package(path.removeprefix("pkg://"), key)
    file = Path(local_path(path, key)).expanduser()
    return _read_objects(file, key) if file.suffix == OBJECTS_SUFFIX else _import_file(file, key)


# ---- Python objects as a file, which a configuration can name: `run/objects.pkl:reward`

OBJECTS_SUFFIX = ".pkl"
_objects_here: dict[Path, ModuleType] = {}
"""The objects of this process, by the file that it wrote: they keep their identity here."""


def write_objects(path: Path, objects: Mapping[str, Any]) -> None:
    """Write the objects, by name, so that a configuration can name them as `{path}:{name}`.

    This process finds the objects themselves there, other processes copies.
    """
    for name, value in objects.items():
        try:
            cloudpickle.dumps(value)
        except (pickle.PicklingError, TypeError, RuntimeError) as error:
            raise ConfigError(
                f"{name}={value!r} cannot be sent to other processes: {error}; it must not hold "
                "open files, locks, or connections, which it can open when it is first called"
            ) from error
    with written_aside(path) as aside:
        aside.write_bytes(cloudpickle.dumps(dict(objects)))
    _objects_here[path.resolve()] = _module_of(path, objects)


def _read_objects(path: Path, key: str) -> ModuleType:
    resolved = path.resolve()
    if resolved not in _objects_here:
        if not path.is_file():
            raise ConfigError(f"{key}: {path} does not exist")
        try:
            objects = cloudpickle.loads(path.read_bytes())
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise _failed_import(str(path), key, error) from error
        if not isinstance(objects, dict):
            raise ConfigError(f"{key}: {path} holds no objects by name")
        _objects_here[resolved] = _module_of(path, objects)
    return _objects_here[resolved]


def _module_of(path: Path, objects: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(path.stem)
    vars(module).update(objects)
    return module


def _import_package(dotted: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(dotted)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _failed_import(f"pkg://{dotted}", key, error) from error


def _import_file(path: Path, key: str) -> ModuleType:
    if path.suffix != ".py":
        raise ConfigError(
            f"{key}: {path} is not a Python file; give /x/y.py, file:///x/y.py or pkg://a.b.c"
        )
    if not path.is_file():
        raise ConfigError(f"{key}: {path} does not exist{_near_file(path)}")
    resolved = path.resolve()
    digest = hashlib.sha256(str(resolved).encode()).hexdigest()[:8]
    module_name = f"caldera_user_{path.stem}_{digest}"
    # Once a process: running a file twice would make its classes, and what it registers, twice.
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, resolved)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _failed_import(str(path), key, error) from error
    return module


def _failed_import(path: str, key: str, error: BaseException) -> ConfigError:
    """Tells what a module raised, and where in the user's own code."""
    frames, said = own_frames(error), str(error)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        where, said = f" ({error.filename}:{error.lineno})", error.msg
    kind = type(error).__name__
    return ConfigError(
        f"{key}: {path} cannot be imported: {f'{kind}: {said}' if said else kind}{where}"
    )


def _near_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f", nor does its folder {folder}"
    guess = nearest(path.name, sorted(p.name for p in folder.glob("*.py")))
    return f"; did you mean {folder / guess}?" if guess else ""


def _defined_names(module: ModuleType) -> list[str]:
    """The public functions and classes that a module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", None) == module.__name__
    ]


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "no functions or classes"


def registered_or_own(registry: Registry[T], name: str) -> T:
    """The registered thing of that name, or the one that `path:name` points at.

    The path is `/x/y.py`, `file:///x/y.py` or `pkg://a.b.c`. What it points at is registered under
    the whole text, so that a later lookup in this process finds it.
    """
    path, _, attribute = name.rpartition(":")
    if name not in registry and (path.endswith(".py") or path.startswith("pkg://")):
        registry.register(name)(load_object(path, attribute, registry.kind))
    return registry[name]


def chosen_class(registry: Registry[Any], name: str | None, base: type[T], key: str) -> type[T]:
    """The class that a key names: a registered or a custom one, derived from the base; by default
    the base itself."""
    if name is None:
        return base
    if name not in registry:
        try:
            return load_class(name, base, key)
        except ConfigError as error:
            known = ", ".join(registry.names())
            raise ConfigError(f"{error}, or a registered {registry.kind} ({known})") from error
    chosen: type[Any] = registry[name]
    if not issubclass(chosen, base):
        raise ConfigError(
            f"{key}={name!r}: is {chosen.__qualname__}, which is not derived from "
            f"{base.__qualname__}"
        )
    return chosen
