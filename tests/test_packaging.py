"""The repository root is the package: what pyproject names, what lies on disk and what a wheel holds must agree."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_SHIPPED = {"tests", "docs", "build", "dist"}
OWN = {"spectrain", "commands", "extract", "heads", "infer", "kernels", "recipes", "train", "cli"}


def library_files() -> list[Path]:
    """Every .py that a wheel should hold, relative to the root."""
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
    return sorted(p for p in paths if p.parts[0] not in NOT_SHIPPED and not p.parts[0].startswith("."))


def tracked_text_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def packages_on_disk(root: Path) -> set[str]:
    folders = {path.parent for path in library_files()} if root == ROOT else set()
    return {".".join(("spectrain", *folder.parts)) for folder in folders}


def test_packages_listed_are_the_folders_on_disk() -> None:
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk(ROOT)


def test_every_package_has_an_init() -> None:
    for package in PYPROJECT["tool"]["setuptools"]["packages"]:
        folder = ROOT.joinpath(*package.split(".")[1:])
        assert (folder / "__init__.py").is_file(), f"{folder} has no __init__.py"


def test_root_holds_no_stray_module() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "cli.py"}


def test_every_data_file_of_a_package_is_shipped() -> None:
    shipped = PYPROJECT["tool"]["setuptools"]["package-data"]
    data = [p for p in (ROOT / "recipes").rglob("*") if p.suffix in {".yaml", ".json", ".gz"}]
    for path in data:
        name = path.relative_to(ROOT / "recipes").as_posix()
        assert any(fnmatch(name, pattern) for pattern in shipped["spectrain.recipes"]), f"recipes/{name} is not shipped"


def own_absolute_imports(source: str) -> list[str]:
    """Imports that name one of our modules from the top instead of relatively."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in OWN]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found += [node.module] if node.module.split(".")[0] in OWN else []
    return found


def test_library_imports_itself_relatively() -> None:
    wrong = {str(p): own_absolute_imports((ROOT / p).read_text()) for p in library_files()}
    assert {name: imports for name, imports in wrong.items() if imports} == {}


@pytest.mark.parametrize("line", ["import heads.base", "from spectrain.infer import planes", "from train import batch"])
def test_absolute_own_import_is_noticed(line: str) -> None:
    assert own_absolute_imports(line)


def test_tests_mirror_existing_folders() -> None:
    folders = {p.parent.relative_to(ROOT / "tests") for p in (ROOT / "tests").rglob("test_*.py")}
    assert [str(folder) for folder in folders if not (ROOT / folder).is_dir()] == []


def test_no_machine_path_in_the_tree() -> None:
    """A path of the author's machine is a fault everywhere else."""
    pattern = re.compile(rb"(?<![\w./-])/(?:work|home/[a-z]\w*|tmp/w|Users)/[\w.-]+")
    found = {}
    for path in tracked_text_files():
        if path != Path(__file__) and (match := pattern.search(path.read_bytes())):
            found[str(path.relative_to(ROOT))] = match.group().decode()
    assert found == {}


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "ARCHITECTURE.md", "Makefile"])
def test_documents_name_files_that_exist(name: str) -> None:
    """Every path in backquotes with a slash or a known suffix is there."""
    text = (ROOT / name).read_text()
    quoted = re.findall(r"`([\w./-]+\.(?:py|md|yaml|toml))`", text)
    quoted += re.findall(r"`((?:commands|extract|heads|infer|kernels|recipes|tests|train)/[\w./-]*)`", text)
    assert [path for path in quoted if not _placeholder(path) and not (ROOT / path).exists()] == []


def _placeholder(path: str) -> bool:
    """`heads/x.py` stands for any head; files of an output folder have no slash and are not ours."""
    return Path(path).stem in {"x", "test_x"} or ("/" not in path and not (ROOT / path).exists())


@pytest.mark.slow
def test_wheel_holds_every_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"spectrain/{path.as_posix()}" for path in library_files()}
    expected |= {f"spectrain/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "recipes").rglob("*.yaml")}
    assert expected - held == set()
    assert not any(name.startswith(("spectrain/tests/", "tests/")) for name in held)
