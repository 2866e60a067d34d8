"""Plug-ins (losses, environments, ...) by name, everywhere with one syntax: registered, `package.module:Name`, or
`FILE.py:Name`.

A plug-in of a user's own may stand in a file anywhere, or in a module of the folder where Fresco is started. That
folder is searched last: a user's `envs/__init__.py` can never take the place of ours. It imports no torch.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ValidationError

from rl.config.schema import ConfigError, nearest
from rl.config.section import NO_FLAG, refuse_size
from rl.config.tree import first_fault

_ROOT = Path(__file__).parents[2]  # the folder that holds our packages
_OURS = ("algos", "envs", "launch", "rl", "rollout")  # experiments/ has plug-ins as a user has


def load(field: str, name: str, known: Mapping[str, Any]) -> Any:
    """What the configuration's `field` names: an entry of `known`, or the object at `package.module:Name` or
    `FILE.py:Name`.

    An entry of `known` may itself be such a path, which is imported only now. Raises ConfigError in one line that names
    the field, the value and the fix.
    """
    target = known.get(name, name)
    if not isinstance(target, str):
        return target

    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        close = nearest(name, list(known))
        own = "your own is written package.module:Name or FILE.py:Name"
        raise ConfigError(f"{field}={name!r} is not a registered name{close}; {own}")

    search_folder(os.getcwd())
    try:
        module = _of_file(Path(module_name)) if is_file(module_name) else _imported(module_name)
    except ImportError as error:
        where = f"modules are looked for in our packages, the installed ones and {os.getcwd()}"
        raise ConfigError(f"{field}={name!r} cannot be imported: {error}; {where}") from error
    except Exception as error:  # of a module that is not ours
        raise ConfigError(f"{field}={name!r} cannot be imported: {told(error)}; mend the file") from error

    if not hasattr(module, attribute):
        public = [each for each in vars(module) if not each.startswith("_")]
        raise ConfigError(f"{field}={name!r} cannot be imported: no {attribute!r} in it{nearest(attribute, public)}")
    return getattr(module, attribute)


def told(error: BaseException) -> str:
    """An error in one line, with the place in a file of the user's own where it was raised, if it was."""
    place = own_place(error)
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{what} ({place})" if place else what


def own_place(error: BaseException) -> str:
    """Where in a file that is neither ours nor an installed one an error was raised; empty if it was in none."""
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        elsewhere = frame.filename.startswith(("<", *installed))
        if not elsewhere and not any(Path(frame.filename).is_relative_to(_ROOT / name) for name in _OURS):
            return f"{frame.filename}, line {frame.lineno}"
    return ""


def check_call(what: str, function: Any, *given: object) -> None:
    """It can be called with what it will be given. Raises ConfigError; what has no signature is not looked at."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise ConfigError(f"{what}{signature} is called with {len(given)} arguments: {error}") from None


def is_file(module: str) -> bool:
    """Whether a plug-in's module is written as a file."""
    return module.endswith(".py")


def _of_file(path: Path) -> ModuleType:
    """The module of a file, once in a process. It finds others that stand beside it, last of all."""
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if (loaded := _loaded_from(path)) is not None:
        return loaded

    name = f"{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    search_folder(str(path.parent))
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _imported(name: str) -> ModuleType:
    """The module of this name, or that of the same file where a file was named before."""
    spec = None if name in sys.modules else find_spec(name)
    loaded = (
        _loaded_from(Path(spec.origin).resolve()) if spec is not None and spec.has_location and spec.origin else None
    )
    return loaded or importlib.import_module(name)


def _loaded_from(path: Path) -> ModuleType | None:
    """The module of this file, under whatever name: what it registers it registers once."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and os.path.basename(file) == path.name and Path(file).resolve() == path:
            return module
    return None


def load_class(field: str, name: str, known: Mapping[str, Any], needs: Sequence[str]) -> Any:
    """The class that `field` names, which has the methods that it `needs`. Raises ConfigError."""
    kind = load(field, name, known)
    if missing := [method for method in needs if not callable(getattr(kind, method, None))]:
        raise ConfigError(f"{field}={name!r} is no class for this: it has no method {missing[0]!r}")
    return kind


def make(field: str, name: str, known: Mapping[str, Any], needs: Sequence[str] = (), **arguments: Any) -> Any:
    """An instance of the class that `field` names, which has the methods that it `needs`.

    Raises ConfigError, also when the class refuses its arguments.
    """
    kind = load_class(field, name, known, needs)
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{field}={name!r} cannot be made: {error}") from error


def validated(model: type[BaseModel], options: dict[str, Any], where: str) -> Any:
    """The options of a plug-in as its own model has them; `where` they stand, for messages. Raises ConfigError."""
    known = list(model.model_fields)
    for key in options:  # here, so that a model that forgot extra="forbid" is closed as well
        if key not in known:
            raise ConfigError(f"unknown key '{where}.{key}'{nearest(key, known)}")
    try:
        made = model.model_validate(options)
    except ValidationError as error:
        raise ConfigError(first_fault(error, options, where)) from None
    _check_numbers(made, options, where)
    return made


def _check_numbers(value: Any, given: Any, where: str) -> None:
    """Options are held to what `Section` holds its fields to, in sections, mappings and lists as well. Raises
    ConfigError."""
    if isinstance(value, BaseModel):
        parts: dict[Any, Any] = {name: getattr(value, name) for name in value.model_fields_set}
    elif isinstance(value, dict):
        parts = value
    elif isinstance(value, list | tuple):
        parts = dict(enumerate(value))
        given = dict(enumerate(given)) if isinstance(given, list | tuple) else given

    else:
        try:
            if isinstance(given, bool) and not isinstance(value, bool):
                raise ValueError(NO_FLAG)
            refuse_size(where.rpartition(".")[2], value)
        except ValueError as error:
            raise ConfigError(f"{where}={given!r}: {error}") from None
        return

    for name, part in parts.items():
        _check_numbers(part, given.get(name) if isinstance(given, dict) else part, f"{where}.{name}")


def own_packages_first() -> None:
    """To be called once, where a command starts: from then on neither this process nor its children take our packages
    from the working folder."""
    elsewhere = [path for path in sys.path if not _is_working_folder(path)]
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if not _is_working_folder(path)]

    if os.environ.get("PYTHONPATH") or (_ROOT / "pyproject.toml").exists():  # a checkout need not be installed
        elsewhere.insert(0, str(_ROOT))
        inherited.insert(0, str(_ROOT))

    sys.path[:] = elsewhere
    os.environ["PYTHONPATH"] = os.pathsep.join(inherited)
    os.environ["PYTHONSAFEPATH"] = "1"  # `python -m` does not put the working folder first


def search_folder(folder: str) -> None:
    """Search a user's folder last of all, so that a name of ours is always ours."""
    if folder not in sys.path:
        sys.path.append(folder)


def _is_working_folder(path: str) -> bool:
    return not path or os.path.realpath(path) == os.path.realpath(os.getcwd())
