import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]
BROUGHT_BY_EXTRAS = {"av": "imageio[pyav]"}


def sources() -> list[Path]:
    """Every module of the packages."""
    return [path for folder in set(FOLDERS.values()) for path in (ROOT / folder).rglob("*.py")]


def distribution(name: str) -> str:
    """A distribution's name as the index compares it, without extras and versions."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", name)[0]).lower()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in a wheel built from a copy, so that nothing is left in the checkout."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for entry in (*set(FOLDERS.values()), "tests", "scripts"):
        shutil.copytree(ROOT / entry, copy / entry, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    done = subprocess.run([*build, str(out), str(copy)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path).namelist()


def test_packages_are_those_on_disk() -> None:
    found = {"sagecli"}
    for package, folder in FOLDERS.items():
        found |= {".".join([package, *path.parent.relative_to(ROOT / folder).parts])
                  for path in (ROOT / folder).rglob("*.py")}  # fmt: skip
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(found)
    assert all((ROOT / folder / "__init__.py").is_file() for folder in FOLDERS.values())


def test_wheel_holds_every_module_and_all_data(wheel: list[str]) -> None:
    expected = {"sagecli/py.typed"}
    for package, folder in FOLDERS.items():
        inside = package.replace(".", "/")
        data = [
            path
            for pattern in ("tiny/**/*", "*.toml", "ablations/*.toml", "prompts/*.txt", "**/*.j2")
            for path in (ROOT / folder).glob(pattern)
        ]
        files = [path for path in (*(ROOT / folder).rglob("*.py"), *data) if path.is_file()]
        expected |= {f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" for path in files}
    assert {"sagecli/presets/quickstart.toml", "sagecli/presets/prompts/shapes-train.txt"} <= expected
    assert {name for name in wheel if ".dist-info/" not in name} == expected


def test_wheel_states_the_licence(wheel: list[str]) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)
    text = " ".join((ROOT / "LICENSE").read_text(encoding="utf-8").split())
    assert text.startswith("Apache License Version 2.0, January 2004")
    assert text.endswith(
        "See the License for the specific language governing permissions and limitations under the License."
    )


def test_every_runtime_dependency_is_used() -> None:
    modules: set[str] = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.split(".")[0])
    owners = packages_distributions()
    used = {distribution(owner) for module in modules for owner in owners.get(module, [])}
    declared = {distribution(requirement) for requirement in PROJECT["project"]["dependencies"]}
    assert declared - used == set()
    assert set(BROUGHT_BY_EXTRAS.values()) <= {re.split("[>=]", one)[0] for one in PROJECT["project"]["dependencies"]}
    assert used - declared - {"sage-grpo", *BROUGHT_BY_EXTRAS} == set(), "imported, but not declared"


def test_constraints_pin_every_dependency_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dev"]
    assert {distribution(requirement) for requirement in wanted} <= {distribution(name) for name in pins}


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['sage', '--help']\n"
        "from sagecli.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print('HEAVY', *({'torch', 'diffusers', 'transformers', 'peft', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "tests")
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout
    assert done.stdout.splitlines()[-1].split() == ["HEAVY"]
