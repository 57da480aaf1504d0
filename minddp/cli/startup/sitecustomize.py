"""Run first by a Python that a program with minddp has started: when torch is imported, its class becomes minddp's.

:func:`minddp.install` puts this folder into ``PYTHONPATH``, and every Python imports a module of this name when it
starts. It imports neither torch nor minddp, only waits for the program to import one of them. The program finds
``sys.path`` without this folder, and the next ``sitecustomize`` on it has run. In a Python that cannot load minddp
nothing happens.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False
# Old Pythons read this, too: no newer syntax, and no `typing`, whose import takes long.
import os
import sys
from importlib.machinery import PathFinder

_FOLDER = os.path.dirname(__file__)


class _Finder:
    """First in ``sys.meta_path``: after torch minddp is imported, after minddp its ``install()`` is called."""

    def find_spec(self, name, path=None, target=None):
        then = {"torch": _import_minddp, "minddp": self.install}.get(name)
        if then is None:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is None and name == "minddp":  # the program that has called install() found it here
            spec = PathFinder.find_spec(name, [os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))])
        if spec is not None and spec.loader is not None:
            _when_imported(spec.loader, then)
        return spec

    def install(self, minddp):
        sys.meta_path.remove(self)
        minddp.install()


def _when_imported(loader, then):
    """Calls ``then(module)`` when ``loader`` has run the module's code."""

    def run(module):
        del loader.exec_module
        loader.exec_module(module)
        then(module)

    loader.exec_module = run


def _import_minddp(torch):
    if "minddp" in sys.modules or getattr(torch, "__file__", None) is None:  # it imports torch now; a folder's name
        return
    try:
        import minddp  # noqa: F401
    except ImportError:  # it is not built for this Python, or not for its torch
        pass
    except Exception as error:  # whatever it is, this may not end a program that has asked for nothing
        print(f"minddp.install() has not reached this process: {error!r}", file=sys.stderr)


sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
del sys.modules[__name__]
import sitecustomize  # noqa: E402, F401  # the next one; where there is none, Python ignores this ImportError
