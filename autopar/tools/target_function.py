"""The function that a target names: its module or its file is imported, and what fails there is
said with its line.

Example: import_function("my_model.py:make") is the function `make` of a file of the current folder,
import_function("package.module:make") that of a module. targets.py calls it.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from autopar.errors import AutoparError


class TargetError(AutoparError):
    """A target of the command line that cannot be found, built or given such a batch."""


def import_function(text: str) -> Callable[..., Any]:
    """Return the function of "package.module:function", looked for in the current folder too, or of
    "folder/file.py:function". Raises TargetError.
    """
    path, _, name = text.rpartition(":")
    module = _load_file(text, Path(path)) if path.endswith(".py") else _load_module(text, path)
    function: Any = module
    for attribute in name.split("."):
        function = getattr(function, attribute, None)
    if not callable(function):
        names = ", ".join(_names_in(module)) or "none"
        file = getattr(module, "__file__", None)
        raise TargetError(
            f"target {text!r}: {path} has no function {name!r}; it has {names}"
            + (f" ({file})" if file and file != path else "")
        )
    return function


def function_names(file: str) -> list[str]:
    """Return the first public functions that a file defines. Raises TargetError."""
    return _names_in(_load_file(file, Path(file)))


def _load_module(text: str, name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = f"it imports {error.name!r}, which is not installed"
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            missing = (
                f"there is no module {error.name!r} here or among what is installed (looked in "
                f"{', '.join(str(Path(folder).absolute()) for folder in sys.path)})"
            )
        raise TargetError(f"target {text!r}: {missing}") from None
    except Exception as error:
        raise target_error(text, f"importing {name}", error) from error


def _load_file(text: str, file: Path) -> ModuleType:
    """Return a file as the module that it would be in its own folder, whose neighbours it finds."""
    if not file.is_file():
        raise TargetError(f"target {text!r}: there is no file {file.absolute()}")
    if (folder := str(file.parent.absolute())) not in sys.path:
        sys.path.insert(0, folder)
    name = file.stem if file.stem not in sys.modules else f"target {file.absolute()}"
    source = importlib.util.spec_from_file_location(name, file)
    assert source is not None and source.loader is not None  # as for every name that ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(source)
    try:
        source.loader.exec_module(module)
    except ModuleNotFoundError as error:
        missing = f"it imports {error.name!r}, which is not installed and not beside it"
        raise TargetError(f"target {text!r}: {missing}") from None
    except Exception as error:
        raise target_error(text, f"running {file}", error) from error
    return module


def _names_in(module: ModuleType) -> list[str]:
    """Return the first public functions that a module itself defines, in their order."""
    members = inspect.getmembers(module, inspect.isfunction)
    own = [f for n, f in members if f.__module__ == module.__name__ and not n.startswith("_")]
    return [f.__name__ for f in sorted(own, key=lambda f: f.__code__.co_firstlineno)][:8]


def target_error(text: str, doing: str, error: Exception) -> TargetError:
    """Return the error with which the target failed, with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return TargetError(f"target {text!r}: {doing} gave {type(error).__name__}: {error}{place}")
