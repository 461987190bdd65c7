"""Whether `collectives` and `mpicomp` are ours: another package may install a module of the same name over them."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path, PurePath

from mpicomp.cli.doctor.finding import Finding

OURS = ("collectives", "mpicomp")
MOST_NAMED = 3
_HOME = Path(__file__).resolve().parents[3]  # of the packages that this file belongs to
_AGAIN = "pip install --force-reinstall --no-deps mpicomp, best in an environment of its own"


def own_packages(home: Path = _HOME, installed: Iterable[Distribution] | None = None) -> Finding:
    """Look where `collectives` is imported from, and whether the files are those that were installed.

    It must lie beside `mpicomp`, in the folder `home`. Where a distribution was installed there, its RECORD has a hash
    of every file; one that is editable, and a checkout on PYTHONPATH, have none.
    """
    everything = list(distributions() if installed is None else installed)
    spec = find_spec("collectives")
    found = None if spec is None else _folder(spec.origin, spec.submodule_search_locations)
    if found != home / "collectives":
        owners = _owners(everything, [found / "__init__.py"]) if found else []
        text = f"collectives is imported from {found}, which is not ours: that is {home / 'collectives'}"
        return Finding("packages", "FAIL", text, _cure(owners, "look for it in PYTHONPATH and the current folder"))
    recorded = [
        one for one in everything if _name(one) == "mpicomp" and Path(str(one.locate_file(""))).resolve() == home
    ]
    altered = [path for one in recorded for path in _altered(one)]
    if altered:
        named = ", ".join(str(path.relative_to(home)) for path in altered[:MOST_NAMED])
        more = f" and {len(altered) - MOST_NAMED} more" if len(altered) > MOST_NAMED else ""
        text = f"files are not those that mpicomp has installed: {named}{more}"
        return Finding("packages", "warn", text, _cure(_owners(everything, altered), _AGAIN))
    return Finding("packages", "ok", f"collectives and mpicomp are ours, in {home}")


def _folder(origin: str | None, locations: Iterable[str] | None) -> Path | None:
    """Where a package lies; one without an ``__init__.py`` has locations alone."""
    places = [str(Path(origin).parent)] if origin else list(locations or ())
    return Path(places[0]).resolve() if places else None


def _altered(installed: Distribution) -> Iterator[Path]:
    """The modules of ours whose bytes are not those of the RECORD, or that are gone."""
    for file in installed.files or ():
        if file.parts[0] in OURS and file.suffix == ".py" and file.hash is not None:
            path = _place(installed, file)
            if not path.exists() or _digest(path, file.hash.mode) != file.hash.value:
                yield path


def _place(installed: Distribution, file: PurePath | str) -> Path:
    """Where a file of a distribution lies."""
    return Path(str(installed.locate_file(str(file)))).resolve()


def _digest(path: Path, algorithm: str) -> str:
    """The hash of a file as a RECORD has it."""
    return urlsafe_b64encode(hashlib.new(algorithm, path.read_bytes()).digest()).decode().rstrip("=")


def _owners(installed: Iterable[Distribution], paths: Iterable[Path]) -> list[str]:
    """The names of other distributions that have installed one of these files."""
    wanted = {path.resolve() for path in paths}
    names = {path.name for path in wanted}
    return sorted(
        {
            f"{_name(one)} {one.version}"
            for one in installed
            if _name(one) != "mpicomp"
            for file in one.files or ()
            if file.name in names and _place(one, file) in wanted
        }
    )


def _name(installed: Distribution) -> str:
    return str(installed.metadata["Name"])


def _cure(owners: list[str], otherwise: str) -> str:
    if not owners:
        return otherwise
    return f"pip uninstall {' '.join(owner.split()[0] for owner in owners)} ({', '.join(owners)}), then {_AGAIN}"
