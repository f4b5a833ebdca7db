"""The images of docker/: linted, and their commands replayed, as there is no Docker here.

Of an image's RUN lines, those that build the wheels run in a build context as .dockerignore leaves
it, and those that install packages only resolve them. What apt-get installs is not tried.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from caldera.installation import BUILT_FROM, commit

ROOT = Path(__file__).parents[2]
IMAGES = sorted((ROOT / "docker").glob("Dockerfile.*"))
PYTORCH = re.compile(r"--index-url https://download\.pytorch\.org/\S+")
"""It has the same versions as PyPI, built for CPUs alone."""

images = pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)


class Instruction(NamedTuple):
    name: str
    value: str


def stages(image: Path) -> list[list[Instruction]]:
    """The instructions of each stage, without comments, each on one line."""
    lines = [line for line in image.read_text().splitlines() if not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found: list[list[Instruction]] = []
    for line in filter(None, whole.splitlines()):
        name, _, value = line.partition(" ")
        if name == "FROM":
            found.append([])
        found[-1].append(Instruction(name, value))
    return found


def kept_names() -> set[str]:
    """What .dockerignore, which leaves out everything, takes back in."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    return {line[1:] for line in lines if line.startswith("!")}


@images
def test_the_linter_finds_nothing(image: Path) -> None:
    done = subprocess.run(["hadolint", image], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@images
def test_what_is_copied_is_in_the_context(image: Path) -> None:
    kept = kept_names()
    assert {name for name in kept if not (ROOT / name).exists()} == set()
    build, final = stages(image)
    copied = [value.split() for name, value in build + final if name == "COPY"]
    assert [".", "."] in copied
    for *sources, _ in copied:
        if not sources[0].startswith("--from="):
            assert set(sources) <= kept | {"."}


@images
def test_it_starts_the_command_line(image: Path) -> None:
    """With the Python that is tested."""
    build, final = stages(image)
    assert build[0].value == "python:3.11-bookworm AS build"
    assert final[0].value == "python:3.11-slim-bookworm"
    assert final[-2:] == [
        Instruction("ENTRYPOINT", '["caldera"]'),
        Instruction("CMD", '["--help"]'),
    ]


# ---------------------------------------------------------------------- replayed


def replay(script: str, folder: Path, dist: Path, **variables: str) -> None:
    script = PYTORCH.sub("", script).replace("/dist", str(dist))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PIP_QUIET": "1", **variables},
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"


def commands(stage: list[Instruction], program: str) -> list[str]:
    return [value for name, value in stage if name == "RUN" and value.startswith(program)]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last commit, with what .dockerignore keeps."""
    folder = tmp_path_factory.mktemp("images") / "context"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", ROOT.as_uri(), folder], check=True)
    for path in folder.iterdir():
        if path.name not in kept_names():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


@pytest.fixture(scope="module")
def dist(context: Path) -> Path:
    """What stands for /dist: the wheels, as the first stage builds them."""
    (script,) = {script for image in IMAGES for script in commands(stages(image)[0], "pip ")}
    replay(script, context, context.parent / "dist")
    return context.parent / "dist"


def test_the_wheels_of_the_images_know_their_commit(dist: Path) -> None:
    wheels = {wheel.name.partition("-")[0]: wheel for wheel in dist.iterdir()}
    assert wheels.keys() == {"caldera", "caldera_verl"}
    noted = zipfile.ZipFile(wheels["caldera"]).read(f"caldera/{BUILT_FROM.name}").decode()
    assert noted == f"{commit().hash}\n"  # and no mark of changes


@images
def test_the_packages_of_the_image_fit_each_other(image: Path, context: Path, dist: Path) -> None:
    """pip resolves them among the tested versions, and installs nothing."""
    _, final = stages(image)
    (constraints,) = (
        value for name, value in final if name == "ENV" and value.startswith("PIP_CONSTRAINT=")
    )
    assert f"COPY constraints.txt {constraints.partition('=')[2]}" in image.read_text()
    scripts = commands(final, "pip install ")
    assert len(scripts) == 2
    for script in scripts:
        replay(script, context, dist, PIP_DRY_RUN="1", PIP_CONSTRAINT=str(ROOT / "constraints.txt"))
