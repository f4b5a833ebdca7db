"""Data sets that are folders of files, here or on the Hugging Face Hub, and their splits.

`FOLDER:SPLIT`, `FOLDER:CONFIG/SPLIT`, `OWNER/NAME:CONFIG/SPLIT`, `OWNER/NAME@REVISION:SPLIT`; with
`hf://datasets/` in front, a name is of the hub whatever there is here. README.md says which files a
config and a split have, as on the hub; without it, their names do.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from caldera.errors import DataError
from caldera.http_client import httpx_library

logger = logging.getLogger(__name__)

ON_HUB = "hf://datasets/"
_PART = r"(?::(?:(?P<config>[\w.-]+)/)?(?P<split>[\w.-]+))?"
_HUB = re.compile(rf"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?{_PART}")
_FOLDER = re.compile(rf"(?P<name>.+?){_PART}", re.DOTALL)
CARD = "README.md"
WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in the names of files and folders that tell a split."""
USUAL = {"data.val_files": ("test", "validation")}
"""Splits that a key takes where none is named, the first of which there is; others take train."""

Splits = Mapping[str, Sequence[str]]
"""Files, as paths relative to the folder, by split."""


@dataclass(frozen=True)
class DataSet:
    """A folder of data files, and which of them are asked for."""

    shown: str
    name: str
    """Folder or repository."""
    is_here: bool
    revision: str | None = None
    config: str | None = None
    split: str | None = None


def data_set(given: str, extensions: tuple[str, ...]) -> DataSet | None:
    """The data set that a name stands for; None where it is that of a file."""
    if given.startswith(ON_HUB):
        match = _HUB.fullmatch(given.removeprefix(ON_HUB))
        return None if match is None else DataSet(given, is_here=False, **match.groupdict())
    local = _FOLDER.fullmatch(given.removeprefix("file://"))
    if local is not None and Path(local["name"]).expanduser().is_dir():
        return DataSet(given, is_here=True, **local.groupdict())
    match = _HUB.fullmatch(given)
    is_hub = match is not None and not given.endswith(extensions)
    if match is None or not is_hub or Path(given).parent.is_dir():
        return None
    return DataSet(given, is_here=False, **match.groupdict())


def files_of(data: DataSet, key: str, extensions: tuple[str, ...]) -> list[Path]:
    """The files of the split, which a data set of the hub has fetched; `key` named it."""
    if data.is_here:
        folder = Path(data.name).expanduser()
        names = _names_in(folder)
        return [folder / name for name in _chosen(data, key, names, _card(folder), extensions)]
    return _from_hub(data, key, extensions)


def _names_in(folder: Path) -> list[str]:
    return sorted(
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*")
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(folder).parts)
    )


def _card(folder: Path) -> str:
    card = folder / CARD
    return card.read_text(encoding="utf-8") if card.is_file() else ""


def _from_hub(data: DataSet, key: str, extensions: tuple[str, ...]) -> list[Path]:
    """Fetched into the hub's cache; without a network, what that has."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    httpx = httpx_library()
    api: Any = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    try:
        try:
            found = api.dataset_info(data.name, revision=data.revision)
        except (OfflineModeIsEnabled, httpx.TransportError) as error:
            return _from_cache(api, data, key, extensions, str(error))

        def fetch(name: str) -> Path:
            where = {"repo_type": "dataset", "revision": data.revision}
            return Path(str(api.hf_hub_download(data.name, name, **where)))

        names = sorted(file.rfilename for file in found.siblings or ())
        card = fetch(CARD).read_text(encoding="utf-8") if CARD in names else ""
        return [fetch(name) for name in _chosen(data, key, names, card, extensions)]
    except (HfHubHTTPError, HFValidationError, httpx.TransportError, OSError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(
            f"{key}: {data.shown} is no file or folder here, and could not be read from the "
            f"Hugging Face Hub: {first}"
        ) from error


def _from_cache(
    api: Any, data: DataSet, key: str, extensions: tuple[str, ...], why: str
) -> list[Path]:
    folder = Path(
        api.snapshot_download(
            data.name, repo_type="dataset", revision=data.revision, local_files_only=True
        )
    )
    logger.info("%s: the hub cannot be reached, its cache is read: %s", data.shown, why)
    names = _names_in(folder)
    return [folder / name for name in _chosen(data, key, names, _card(folder), extensions)]


# ---- Which files a split has


def _chosen(
    data: DataSet, key: str, names: Sequence[str], card: str, extensions: tuple[str, ...]
) -> Sequence[str]:
    data_files = [name for name in names if name.endswith(extensions)]
    if not data_files:
        known = ", ".join(extensions)
        there = ", ".join(names[:5]) or "nothing"
        raise DataError(f"{key}: {data.shown} has no data files ({known}); it holds {there}")
    configs = _configs(card, data_files)
    if configs:
        splits = configs[_one_config(data, key, configs)]
    else:
        folder = f"{data.config}/" if data.config else ""
        splits = _by_name([name for name in data_files if name.startswith(folder)])
        if not splits:
            folders = sorted({name.partition("/")[0] for name in data_files if "/" in name})
            raise _unknown(data, key, "folder", str(data.config), folders)
    return splits[_one_split(data, key, splits)]


def _one_config(data: DataSet, key: str, configs: Mapping[str, Splits]) -> str:
    if data.config is not None:
        if data.config not in configs:
            raise _unknown(data, key, "config", data.config, list(configs))
        return data.config
    if len(configs) == 1 or "default" in configs:
        return "default" if "default" in configs else next(iter(configs))
    split = data.split or "train"
    raise DataError(
        f"{key}: {data.shown} has the configs {', '.join(configs)}: choose one, such as "
        f"{data.shown.partition(':')[0]}:{next(iter(configs))}/{split}"
    )


def _one_split(data: DataSet, key: str, splits: Splits) -> str:
    if data.split is not None:
        if data.split not in splits:
            raise _unknown(data, key, "split", data.split, list(splits))
        return data.split
    usual = USUAL.get(key, ("train",))
    for split in usual:
        if split in splits:
            return split
    if len(splits) == 1:
        return next(iter(splits))
    raise DataError(
        f"{key}: {data.shown} has the splits {', '.join(splits)}: choose one, such as "
        f"{data.shown}:{next(iter(splits))}"
    )


def _unknown(data: DataSet, key: str, what: str, asked: str, known: Sequence[str]) -> DataError:
    there = ", ".join(known) or "none"
    return DataError(f"{key}: {data.shown} has no {what} {asked!r}; it has {there}")


def _configs(card: str, data_files: Sequence[str]) -> dict[str, Splits]:
    """The configs that the front matter of a card declares, each with its files by split."""
    head = re.match(r"---\r?\n(.*?)\r?\n---", card, re.DOTALL)
    try:
        told = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError:
        return {}
    configs = told.get("configs") if isinstance(told, dict) else None
    found = {}
    for config in configs if isinstance(configs, list) else ():
        if isinstance(config, dict) and (splits := _declared(config, data_files)):
            found[str(config.get("config_name", "default"))] = splits
    return found


def _declared(config: dict[str, Any], data_files: Sequence[str]) -> Splits:
    folder = str(config.get("data_dir") or "").strip("/")
    below = [name for name in data_files if not folder or name.startswith(f"{folder}/")]
    declared = config.get("data_files")
    if declared is None:
        return _by_name(below)
    entries = declared if isinstance(declared, list) else [declared]
    splits: dict[str, list[str]] = {}
    for entry in entries:
        is_split = isinstance(entry, dict)
        paths = entry.get("path") if is_split else entry
        split = str(entry.get("split", "train")) if is_split else "train"
        for path in paths if isinstance(paths, list) else [paths]:
            pattern = f"{folder}/{path}" if folder else str(path)
            splits.setdefault(split, []).extend(_matching(pattern, data_files))
    return {split: names for split, names in splits.items() if names}


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    either = {pattern, pattern.replace("**/", "")}  # ** may stand for no folder at all
    return [name for name in names if any(fnmatch.fnmatchcase(name, each) for each in either)]


def _by_name(names: Sequence[str]) -> Splits:
    """Files by the split that their names tell, or those of their folders; all are train where no
    name tells any."""
    splits: dict[str, list[str]] = {}
    for name in names:
        splits.setdefault(_told(name) or "", []).append(name)
    rest = splits.pop("", [])
    return splits or ({"train": rest} if rest else {})


def _told(name: str) -> str | None:
    path = PurePosixPath(name)
    for part in (path.name.partition(".")[0], *reversed(path.parent.parts)):
        words = re.split(r"[^a-z]+", part.lower())
        for split, known in WORDS.items():
            if set(words) & set(known):
                return split
    return None
