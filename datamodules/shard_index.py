"""Which shards there are: urls from braces, folders and index files, and how many samples each holds."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from webdataset.shardlists import expand_urls

from .image_folder import few

INDEX_NAME = "index.json"
VERSION = 1


@dataclass(frozen=True)
class ShardIndex:
    """Shards in order, the samples of each, and the class names (empty when unknown).

    Args:
        urls: one per shard.
        counts: samples of each shard; empty when unknown.
        classes: names in the order of the class numbers.
    """

    urls: tuple[str, ...]
    counts: tuple[int, ...]
    classes: tuple[str, ...]

    @property
    def samples(self) -> int:
        """Samples of all shards."""
        return sum(self.counts)


def open_shards(where: str) -> ShardIndex:
    """The shards named by a folder, a brace pattern or a list of them joined by "::".

    An `index.json` beside the shards gives counts and classes. Without one, local shards are counted by reading their
    headers, and the counts of remote ones stay unknown.

    Args:
        where: a folder with shards, or urls such as "/data/train-{000000..000099}.tar" or "pipe:curl -s ...".

    Raises:
        FileNotFoundError: if the folder or a local shard is missing.
    """
    folder = Path(where).expanduser()
    if folder.is_dir():
        return _open_folder(folder)
    if not where.strip():
        raise ValueError("no shards given: pass a folder or urls such as '/data/train-{000000..000099}.tar'")
    urls = [str(Path(url).expanduser()) if is_local(url) else url for url in expand_urls(where)]
    _check_present([Path(url) for url in urls if is_local(url)], where)
    known = {place: _known(place) for place in {Path(url).parent for url in urls if is_local(url)}}
    counts = [_count(url, known) for url in urls]
    classes = {found.classes for found in known.values() if found}
    return ShardIndex(
        tuple(urls),
        () if None in counts else tuple(count for count in counts if count is not None),
        classes.pop() if len(classes) == 1 else (),
    )


def is_local(url: str) -> bool:
    """Whether a url is a path of this machine: no scheme such as https: or pipe:."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:", url) is None


def _open_folder(folder: Path) -> ShardIndex:
    index = _known(folder)
    if index is None:
        paths = sorted(folder.glob("*.tar"))
        if not paths:
            raise FileNotFoundError(f"no shards in {folder}: searched for {INDEX_NAME} and *.tar")
        return ShardIndex(tuple(map(str, paths)), tuple(map(count_samples, paths)), ())
    _check_present([Path(url) for url in index.urls], f"{folder / INDEX_NAME} (make the shards again to complete them)")
    return index


def _check_present(paths: Sequence[Path], where: str) -> None:
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"{len(missing)} of {len(paths)} shards named by {where} do not exist: {few(missing)}")


def _known(folder: Path) -> ShardIndex | None:
    """The index file of a folder, if it has one."""
    path = folder / INDEX_NAME
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["version"] != VERSION:
            raise ValueError(f"{path} has version {data['version']}, this release reads version {VERSION}")
        shards = data["shards"]
        urls, counts = [str(folder / shard["name"]) for shard in shards], [int(shard["samples"]) for shard in shards]
        return ShardIndex(tuple(urls), tuple(counts), tuple(data["classes"]))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no index of shards ({type(error).__name__}: {error})") from error


def _count(url: str, known: dict[Path, ShardIndex | None]) -> int | None:
    if not is_local(url):
        return None
    index = known[Path(url).parent]
    if index is not None and url in index.urls:
        return index.counts[index.urls.index(url)]
    return count_samples(Path(url))


def count_samples(path: Path) -> int:
    """Samples of a local shard: names that differ before the first dot. Reads the headers only.

    Args:
        path: of the shard.

    Raises:
        ValueError: if the file is no tar archive or is cut off.
    """
    try:
        with tarfile.open(path) as archive:
            names = [PurePosixPath(member.name) for member in archive if member.isfile()]
    except tarfile.TarError as error:
        raise ValueError(f"cannot count the samples of {path}: {type(error).__name__}: {error}") from error
    return len({name.with_name(name.name.split(".")[0]) for name in names if not name.name.startswith((".", "__"))})
