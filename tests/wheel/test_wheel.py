"""The wheels of `make wheel`: what is in them, and that it runs where nothing else is.

They are installed in an environment of their own, and run from an empty folder.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from caldera import __version__
from caldera.installation import version_line

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
WHEEL = DIST / f"caldera-{__version__}-py3-none-any.whl"
SDIST = DIST / f"caldera-{__version__}.tar.gz"
VERL_WHEEL = DIST / "caldera_verl-0.1.0-py3-none-any.whl"
PIP = ("-I", "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check")
CONSTRAINTS = ("--constraint", str(ROOT / "constraints.txt"))
EXTRAS = sorted(
    set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
)
SECONDS = 280
"""For one command; two of them fit the time limit of a test, so that what they wrote is shown."""


def source_files(package: Path) -> set[str]:
    """All files of a package, relative to the folder that it is in."""
    return {
        str(path.relative_to(package.parent))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def installed_files(wheel: Path) -> set[str]:
    """What a wheel holds beside its own description."""
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if ".dist-info/" not in name}


def metadata() -> Message:
    name = f"caldera-{__version__}.dist-info/METADATA"
    return Parser().parsestr(zipfile.ZipFile(WHEEL).read(name).decode())


# ---------------------------------------------------------------------- contents


def test_the_wheel_holds_the_package_whole_and_nothing_else() -> None:
    files = source_files(ROOT / "src/caldera")
    assert {"caldera/py.typed", "caldera/rollout/native/cpu/kernels.cpp"} <= files
    assert installed_files(WHEEL) == files | {"caldera/commit.txt"}


def test_the_wheel_of_the_name_verl() -> None:
    assert installed_files(VERL_WHEEL) == source_files(ROOT / "compat/verl/src/verl")


def test_the_sdist_builds_without_the_repository() -> None:
    """The wheel was built from it; no tests, no examples are in it."""
    top = f"caldera-{__version__}"
    with tarfile.open(SDIST) as archive:
        files = {m.name.removeprefix(f"{top}/") for m in archive.getmembers() if m.isfile()}
        noted = archive.extractfile(f"{top}/src/caldera/commit.txt").read()
    code = {f"src/{name}" for name in source_files(ROOT / "src/caldera")}
    described = {name for name in files if "egg-info" in name}
    assert files - code - described == {
        "LICENSE", "PKG-INFO", "README.md", "THIRD_PARTY.md", "pyproject.toml", "setup.cfg",
        "setup.py", "src/caldera/commit.txt",
    }  # fmt: skip
    assert noted == zipfile.ZipFile(WHEEL).read("caldera/commit.txt")


def test_the_description_of_the_wheel() -> None:
    described = metadata()
    assert (described["Name"], described["Version"]) == ("caldera", __version__)
    assert sorted(described.get_all("Provides-Extra")) == EXTRAS
    assert described.get_all("License-File") == ["LICENSE", "THIRD_PARTY.md"]


# ---------------------------------------------------------------------- a fresh environment


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has Caldera and what it requires."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    command = [str(python), *PIP, *CONSTRAINTS, str(WHEEL), str(VERL_WHEEL)]
    subprocess.run(command, check=True, timeout=SECONDS)
    return python.parent


def run(environment: Path, folder: Path, program: str, *arguments: str) -> str:
    """The output of a program that ends well."""
    kept = {key: os.environ[key] for key in ("HOME", "LANG") if key in os.environ}
    variables = kept | {
        "CALDERA_CACHE": str(folder / ".cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{environment}:/usr/local/bin:/usr/bin:/bin",
    }
    done = subprocess.run(
        [environment / program, *arguments], cwd=folder, env=variables, capture_output=True,
        text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_version(environment: Path, tmp_path: Path) -> None:
    """And the commit, which git cannot tell there."""
    assert run(environment, tmp_path, "caldera", "--version") == (
        f"caldera {version_line(__version__)}\n"
    )


def test_the_doctor(environment: Path, tmp_path: Path) -> None:
    told = json.loads(run(environment, tmp_path, "caldera", "doctor", "--json"))
    states = {finding["name"]: finding["state"] for finding in told["findings"]}
    assert told["ok"] and states["native sampler"] == "ok"
    (fix,) = (finding["fix"] for finding in told["findings"] if finding["name"] == "peft")
    assert fix == "pip install 'caldera[lora]'"


@pytest.fixture(scope="module")
def demo(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that a short demo has written, and what it showed."""
    folder = tmp_path_factory.mktemp("demo")
    steps = ("trainer.total_training_steps=2", "trainer.test_freq=2")
    shown = run(environment, folder, "caldera", "demo", *steps)
    return folder / "outputs/demo-tiny", shown


def test_the_demo(demo: tuple[Path, str]) -> None:
    folder, shown = demo
    assert re.search(r"Right answers: [\d.]+% before, [\d.]+% after", shown)
    assert (folder / "report.html").is_file()


QUICKSTART = """
import caldera

numbers = range(100)
rows = [{"prompt": f"{a:02d}+{b:02d}", "answer": a + b} for a in numbers for b in numbers]


def right(response, answer):
    return float(response == str(answer))


run = caldera.grpo(
    MODEL, rows[256:], right, eval_dataset=rows[:256], n=8, lr=5e-4, batch_size=32, steps=2,
    max_prompt_length=8, max_response_length=4, output="run",
)
run.train()
print(len(run.metrics), run.generate(["12+34"]), run.report())
"""


def test_python(environment: Path, demo: tuple[Path, str], tmp_path: Path) -> None:
    """Data and reward in a script, from the model of the demo."""
    script = tmp_path / "first.py"
    script.write_text(QUICKSTART.replace("MODEL", repr(str(demo[0] / "start"))))
    told = run(environment, tmp_path, "python", str(script)).splitlines()[-1]
    assert re.fullmatch(r"3 \['\d*'\] .*run/report\.html", told)
    assert (tmp_path / "run/report.html").is_file()


def test_the_name_verl(environment: Path, tmp_path: Path) -> None:
    program = "import verl, caldera; print(verl.DataProto is caldera.DataProto)"
    assert run(environment, tmp_path, "python", "-c", program) == "True\n"
