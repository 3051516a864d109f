"""The three top-level folders are one import tree, in a checkout and in a wheel."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

import mmpe

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
KERNELS = ROOT / "mmpe/ops/rotary_triton.py"  # imported itself only where triton is found
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS = {"mmpe": "mmpe", "mmpe.models": "models", "mmpe.datamodules": "datamodules", "mmpe.configs": "configs"}
LINKED = ("models", "datamodules", "configs")
HEAVY = ("av", "decord", "diffusers", "huggingface_hub", "lightning", "matplotlib", "sklearn", "timm", "torchvision",
         "transformers", "webdataset")  # fmt: skip
# Where a checkout of somebody's machine would show: home folders, scratch folders, the roots of build machines.
MACHINE_PATH = re.compile(r"(?<![\w.\-/$}])/(?:home|root|Users|work|tmp|mnt|opt|workspace)/[\w.\-]+")
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".cfg", ".txt", ""}


def own_files(*suffixes: str) -> list[Path]:
    """The files that git tracks or would track, each once (links are not followed)."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = (ROOT / line for line in listed.stdout.splitlines())
    return [path for path in paths if path.suffix in suffixes and path.is_file() and not path.is_symlink()]


def packages_on_disk() -> set[str]:
    """Dotted names of all folders with an `__init__.py`, as they are imported."""
    found = set()
    for name, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            relative = init.parent.relative_to(ROOT / folder)
            # Python 3.13 walks into links; what lies behind one is counted where it lives.
            if not (folder == "mmpe" and relative.parts[:1] and relative.parts[0] in LINKED):
                found.add(".".join([name, *relative.parts]))
    return found


def test_every_package_is_listed_by_hand():
    assert set(SETUPTOOLS["packages"]) == packages_on_disk()
    assert len(SETUPTOOLS["packages"]) == len(set(SETUPTOOLS["packages"]))


def test_mapping_and_links_name_the_same_folders():
    assert SETUPTOOLS["package-dir"] == FOLDERS
    for folder in LINKED:
        link = ROOT / "mmpe" / folder
        if not link.is_symlink():
            pytest.skip("a checkout without links")
        assert str(link.readlink()) == f"../{folder}"


def test_every_data_file_matches_a_package_data_pattern():
    for name, folder in FOLDERS.items():
        base = ROOT / folder
        packaged = {path for pattern in SETUPTOOLS["package-data"].get(name, []) for path in base.glob(pattern)}
        data = {path for path in own_files(".yaml", ".yml", ".json", ".typed", "") if path.is_relative_to(base)}
        assert data <= packaged, f"not in the wheel: {sorted(map(str, data - packaged))}"
    assert (ROOT / "mmpe" / "py.typed") in own_files(".typed")


def test_top_level_folders_are_never_imported_under_their_bare_name():
    bare = re.compile(rf"^\s*(?:from|import)\s+(?:{'|'.join(LINKED)})\b", re.MULTILINE)
    files = own_files(".py")
    assert len(files) > 10
    assert [path for path in files if bare.search(path.read_text())] == []


def test_core_imports_no_file_of_models_or_datamodules():
    upward = re.compile(r"^\s*(?:from|import)\s+(?:mmpe)?\.+(?:models|datamodules)\b", re.MULTILINE)
    core = [path for path in own_files(".py") if path.is_relative_to(ROOT / "mmpe") and path.parent.name != "cli"]
    assert [path for path in core if upward.search(path.read_text())] == []


def test_importing_mmpe_and_building_an_encoding_loads_torch_alone():
    code = (
        "import sys, mmpe\n"
        "for name in mmpe.list_encodings(): mmpe.describe(name)\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_no_path_of_a_machine_is_in_a_file():
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in own_files(*TEXT)
        for match in MACHINE_PATH.finditer(path.read_text())
    ]
    assert found == []


def test_version_is_stated_once_and_is_in_the_changelog():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", mmpe.__version__)
    assert "version" in PROJECT["project"]["dynamic"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{mmpe.__version__}]" in changelog or "## [Unreleased]" in changelog


def test_dependencies_have_lower_bounds_and_no_upper_pins():
    extras = PROJECT["project"]["optional-dependencies"]
    requirements = [*PROJECT["project"]["dependencies"], *(r for group in extras.values() for r in group)]
    for requirement in requirements:
        specifier = requirement.split(";")[0]
        assert ">=" in specifier, requirement
        assert not re.search(r"<|==|~=|!=", specifier), requirement


def test_every_imported_library_is_declared():
    base = {canonical(requirement) for requirement in PROJECT["project"]["dependencies"]}
    extras = {canonical(r) for group in PROJECT["project"]["optional-dependencies"].values() for r in group}
    providers = importlib.metadata.packages_distributions()
    for path in own_files(".py"):
        tree = ast.parse(path.read_text())
        shipped = any(path.is_relative_to(ROOT / folder) for folder in FOLDERS.values()) and path != KERNELS
        # What an extra brings may be missing, so shipped code imports it in the function that needs it.
        for allowed, nodes in ((base if shipped else base | extras, tree.body), (base | extras, ast.walk(tree))):
            for name in libraries(nodes) - {other.stem for other in (*path.parent.iterdir(), *TESTS.iterdir())}:
                distributions = {canonical(distribution) for distribution in providers.get(name, [name])}
                assert distributions & allowed, f"{path.relative_to(ROOT)} imports {name}: declare it in pyproject.toml"


def canonical(requirement: str) -> str:
    """The name in a requirement, as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.\-]+", requirement)[0]).lower()


def libraries(nodes: Iterable[ast.AST]) -> set[str]:
    """Top-level names of the third-party imports among the nodes of a file."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"mmpe"}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[Path, Path]:
    """An sdist, and a wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(distributions, tmp_path_factory) -> Path:
    """The scripts folder of a new environment that has the wheel, and borrows this one's dependencies."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    bin_folder = folder / ("Scripts" if sys.platform == "win32" else "bin")
    python = bin_folder / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    # The .pth files inside these folders are not read, so the editable mmpe of this environment stays unseen.
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    Path(site, "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, str(distributions[1])], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return bin_folder


@pytest.mark.slow
def test_wheel_holds_every_module_and_recipe_and_nothing_else(distributions):
    sdist, wheel = distributions
    expected = {f"{name.replace('.', '/')}/" for name in SETUPTOOLS["packages"]}
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    shipped = set()
    for name, folder in FOLDERS.items():
        for path in own_files(".py", ".yaml", ".typed"):
            if path.is_relative_to(ROOT / folder):
                shipped.add(f"{name.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}")
    assert names == shipped
    assert {f"{name.rsplit('/', 1)[0]}/" for name in names if name.endswith(".py")} == expected
    assert any(name.endswith("/configs/vit/digits.yaml") for name in tarfile.open(sdist).getnames())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["list"], "rope_mixed"),
        (["describe", "rope_mixed"], "equation"),
        (["configs"], "vit/digits.yaml"),
        (["fit", "--print_config", "--config", "vit/digits.yaml"], "encoding"),
    ],
)
def test_wheel_works_away_from_the_repository(installed, tmp_path, arguments, expected):
    done = subprocess.run([installed / "mmpe", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@pytest.mark.slow
def test_installed_modules_are_the_wheels(installed, tmp_path):
    code = "import mmpe.models, mmpe.configs; print(mmpe.__file__, mmpe.models.__file__, *mmpe.configs.__path__)"
    done = subprocess.run([installed / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    for path in done.stdout.split():
        assert Path(path).is_relative_to(installed.parent)
