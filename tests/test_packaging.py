import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import kvzip_press

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "kvzip_press": ROOT / "kvzip_press",
    "kvzip_press.kernels": ROOT / "kernels",
    "kvzip_press.eval": ROOT / "eval",
}


def package_table() -> dict:
    # The standard library reads TOML from Python 3.11 on.
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def test_every_folder_with_code_is_a_listed_package():
    parents = {(name, file.parent) for name, folder in FOLDERS.items() for file in folder.rglob("*.py")}
    assert [parent for _, parent in parents if not (parent / "__init__.py").is_file()] == []
    listed = {".".join([name, *parent.relative_to(FOLDERS[name]).parts]) for name, parent in parents}
    assert set(package_table()["packages"]) == listed


def test_folders_are_mapped_under_the_package():
    mapped = {name: (ROOT / folder).resolve() for name, folder in package_table()["package-dir"].items()}
    assert {"kvzip_press": FOLDERS["kvzip_press"], **mapped} == FOLDERS


@pytest.mark.parametrize("name", ["kernels", "eval"])
def test_no_top_level_package_is_ours(name, tmp_path):
    """An installed top-level `kernels` would be taken by transformers for the package of that name."""
    code = f"import importlib.util; spec = importlib.util.find_spec({name!r}); print(spec.origin if spec else '')"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    origin = run.stdout.strip()
    assert not origin or ROOT not in Path(origin).resolve().parents


@pytest.mark.parametrize("name", ["kvzip_press.kernels", "kvzip_press.eval"])
def test_mapped_packages_are_importable(name):
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert Path(spec.origin).resolve().parent == FOLDERS[name]


def test_wheel_carries_the_type_marker_and_the_example(tmp_path):
    package = Path(kvzip_press.__file__).parent
    assert (package / "py.typed").is_file()
    assert list((package / "examples").glob("*.txt"))
    data = package_table()["package-data"]["kvzip_press"]
    assert {"py.typed", "examples/*.txt"} <= set(data)


def test_a_checkout_works_without_an_editable_install(tmp_path):
    """From the root of a clone, with the package itself not installed, the folders beside it are still found."""
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]; "
        "import kvzip_press.kernels, kvzip_press.eval; print(kvzip_press.kernels.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "kernels" / "__init__.py"


def test_command_is_declared():
    scripts = importlib.metadata.entry_points(group="console_scripts", name="kvzip-press")
    assert [script.value for script in scripts] == ["kvzip_press.cli:main"]


def test_constraints_satisfy_the_declared_bounds():
    """The versions of CI must lie within what a user's pip may choose."""
    from packaging.requirements import Requirement

    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            pins[pin.name.lower().replace("_", "-")] = str(pin.specifier).removeprefix("==")
    for text in importlib.metadata.requires("kvzip-press"):
        requirement = Requirement(text)
        pinned = pins.get(requirement.name.lower().replace("_", "-"))
        if pinned is not None:
            assert pinned in requirement.specifier, f"{text} refuses {pinned}"
