"""`mmpe configs`: the shipped experiments, and how `--config` finds them."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from ._arguments import parser
from ._errors import UsageError


def main(command: str, argv: list[str]) -> int:
    """List the shipped configs with the first line of each, or copy one."""
    p = parser(command, "Shipped experiments, usable by name from any folder: mmpe fit --config vit/digits.yaml")
    p.add_argument("--copy", nargs=2, metavar=("NAME", "TARGET"), help="copy a config to a file or folder, to edit it")
    p.add_argument("--force", action="store_true", help="overwrite the target of --copy")
    p.add_argument("--path", action="store_true", help="print full paths")
    args = p.parse_args(argv)
    if args.copy:
        name, target = args.copy
        print(copy(name, target, force=args.force))
        return 0
    width = max(map(len, shipped()), default=0)
    for name in shipped():
        path = root() / name
        print(path if args.path else f"{name:<{width}}  {_title(path)}".rstrip())
    return 0


def root() -> Path:
    """Folder of the shipped configs."""
    return Path(str(files("mmpe.configs")))


def shipped() -> list[str]:
    """Names of the shipped configs, such as vit/digits.yaml."""
    return sorted(path.relative_to(root()).as_posix() for path in root().rglob("*.yaml"))


def find(name: str) -> Path:
    """The file that `--config NAME` means: one in the working folder, else a shipped one (".yaml" may be left out).

    Raises:
        UsageError: if neither exists; near names are offered.
    """
    local = Path(name).expanduser()
    if local.is_dir():
        raise UsageError(f"config {name!r} is a folder; name a YAML file in it")
    # A checkout has the shipped folder as ./configs, so that "configs/vit/x.yaml" means the same outside of it.
    bare = name.removeprefix("configs/")
    for candidate in (local, root() / name, root() / f"{name}.yaml", root() / bare):
        if candidate.is_file():
            return candidate
    near = get_close_matches(bare, shipped(), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"shipped: {', '.join(shipped()) or 'none'}"
    raise UsageError(f"no config {name!r} in {Path.cwd()} or among the shipped ones; {hint}")


def copy(name: str, target: str, force: bool = False) -> Path:
    """Copy a shipped config to a file or into a folder; returns the new file."""
    source = find(name)
    path = Path(target).expanduser()
    path = path / source.name if path.is_dir() or target.endswith("/") else path
    if path.exists() and not force:
        raise UsageError(f"{path} exists already; --force overwrites it")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(source.read_bytes())
    return path


def _title(path: Path) -> str:
    first = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""
