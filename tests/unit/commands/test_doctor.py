"""`caldera doctor`: what it finds on machines that are well, and on those that are not."""

from __future__ import annotations

import json
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import caldera
from caldera.cli import main
from caldera.commands import doctor
from caldera.commands.doctor import Finding, Library, State, ask, ask_each, broken, doubtful, ok
from caldera.installation import install_command, version_line

Install = Callable[[str, str], None]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a library of one file, for interpreters that are started from now on."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        told = tmp_path / f"{name}-1.2.3.dist-info"
        told.mkdir()
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n")

    return make


def test_libraries_are_imported_and_not_only_looked_for(install: Install) -> None:
    install("fine", "print('a library that talks')")
    install("ruined", "raise OSError('libfoo.so: not there\\nand more')")
    install("quits", "raise SystemExit(3)")
    names = {name: name for name in ("fine", "ruined", "quits", "missing")}
    answer = ask(sys.executable, names)
    assert answer.python == sys.version.split()[0]
    assert answer.libraries == {
        "fine": Library("1.2.3", None),
        "ruined": Library("1.2.3", "OSError: libfoo.so: not there"),
        "quits": Library("1.2.3", "SystemExit: 3"),
    }


def test_a_library_that_ends_its_process_hides_no_other(install: Install) -> None:
    install("fine", "")
    install("crashes", "import os; os._exit(11)")
    found = ask_each(sys.executable, {"crashes": "crashes", "fine": "fine"})
    assert found["fine"] == Library("1.2.3", None)
    assert "status 11" in str(found["crashes"].problem)


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    answer = ask(tmp_path / "python", {})
    assert answer.libraries is None
    assert "python" in str(answer.problem)


@pytest.mark.parametrize(
    ("found", "is_needed", "state"),
    [
        (None, True, State.BROKEN),
        (None, False, State.ABSENT),
        (Library("2.13.0+cpu", None), True, State.OK),
        (Library("2.9.1", None), True, State.BROKEN),
        (Library("2.13.0", "ImportError: no"), False, State.BROKEN),
    ],
)
def test_what_becomes_of_a_library(found: Library | None, is_needed: bool, state: State) -> None:
    wanted = doctor.Wanted("torch", "extra", (2, 11))
    finding = doctor.library("torch", found, wanted, is_needed)
    assert finding.state is state
    if state is not State.OK:
        assert finding.fix == install_command("extra")


def test_what_it_is_and_what_runs_it() -> None:
    caldera_itself, python = doctor.check_python()
    assert caldera_itself.told.startswith(f"{version_line(caldera.__version__)} in ")
    assert caldera_itself.told.endswith(str(Path("src/caldera")))
    assert (python.name, python.state) == ("Python", State.OK)


def test_versions_are_compared_by_their_numbers() -> None:
    assert doctor.numbers("2.13.0+cpu") == (2, 13, 0)
    assert doctor.numbers("5.12.0rc1") == (5, 12)


def test_the_cluster_that_is_named_must_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert not list(doctor.check_cluster())
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert [finding.state for finding in doctor.check_cluster()] == [State.OK]
    assert [finding.state for finding in doctor.check_cluster()] == [State.BROKEN]
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    (finding,) = doctor.check_cluster()
    assert finding.state is State.BROKEN
    (ray,) = (f for f in doctor.check_libraries({}) if f.name == "ray")
    assert ray.state is State.BROKEN


def test_an_engine_is_missed_where_it_is_looked_for(install: Install) -> None:
    (alone,) = doctor.check_engine_python(Path(sys.executable))
    assert alone.state is State.BROKEN
    assert alone.fix == f"{sys.executable} -m pip install vllm==0.32.0"
    install("vllm", "")  # 1.2.3
    (finding,) = doctor.check_engine_python(Path(sys.executable))
    assert finding.state is State.DOUBTFUL
    assert finding.told == "1.2.3, where 0.32.0 is what it is tested with"
    assert finding.fix == f"{sys.executable} -m pip install vllm==0.32.0"


def test_which_engines_fit() -> None:
    absent = list(doctor.check_engines({}))
    assert [f.state for f in absent] == [State.ABSENT, State.ABSENT]
    assert [f.told for f in absent] == [
        "not installed; 0.32.0 fits", "not installed; 0.5.20 fits"
    ]  # fmt: skip
    assert "pip install sglang==0.5.20" in str(absent[1].fix)
    there = {"vllm": Library("0.32.4+cpu", None), "sglang": Library("0.4.9", None)}
    assert [f.state for f in doctor.check_engines(there)] == [State.OK, State.DOUBTFUL]


def test_the_environments_of_engines_are_made_with_what_fits() -> None:
    script = (ROOT / "scripts" / "engine_venv.py").read_text()
    assert f'VLLM = "{doctor.TESTED["vllm"]}"' in script
    assert f'SGLANG = "{doctor.TESTED["sglang"]}"' in script


def test_a_driver_beside_a_torch_for_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("this torch is for CUDA")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (finding,) = doctor.check_cuda()
    assert finding.state is State.BROKEN
    assert finding.told == f"driver 580.1, but torch {torch.__version__} is for CPUs"
    program.write_text("#!/bin/sh\necho no devices were found; exit 6\n")
    (finding,) = doctor.check_cuda()
    assert finding.state is State.ABSENT


def test_room_on_disk(tmp_path: Path) -> None:
    later = tmp_path / "not" / "yet"
    assert doctor.room("disk", later, 1, 1, "df").state is State.OK
    assert doctor.room("disk", later, 2**80, 1, "df").state is State.DOUBTFUL
    assert doctor.room("disk", later, 2**80, 2**80, "df").state is State.BROKEN
    assert not later.exists()


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [f.state for f in doctor.check_hub()] == [State.OK]
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        (finding,) = doctor.check_hub()
        assert (finding.state, finding.told) == (State.OK, f"{endpoint} can be reached")
    assert [f.state for f in doctor.check_hub()] == [State.DOUBTFUL]


def test_this_machine_has_ports_and_samples() -> None:
    assert next(iter(doctor.check_ports())).state is State.OK
    findings = list(doctor.check_native())
    assert [finding.state for finding in findings] == [State.OK, State.OK], findings


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    sampler, kernels = doctor.check_native()
    assert sampler.state is State.OK
    assert (kernels.name, kernels.state) == ("kernels for the CPU", State.ABSENT)
    assert "there is no C++ compiler" in kernels.told


def test_a_check_that_cannot_import_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_sandbox() -> Iterator[Finding]:
        yield ok("first", "fine")
        raise ModuleNotFoundError("No module named 'torch'")

    def check_disk() -> Iterator[Finding]:
        raise OSError("libcudart.so: not there\nand more")

    monkeypatch.setattr(doctor, "ask_each", lambda python, modules: {})
    monkeypatch.setattr(doctor, "MACHINE", (check_sandbox, check_disk))
    findings = doctor.examine(None)
    assert [(f.name, f.state) for f in findings[-3:]] == [
        ("first", State.OK), ("sandbox", State.BROKEN), ("disk", State.BROKEN)
    ]  # fmt: skip
    assert findings[-2].told.endswith("ModuleNotFoundError: No module named 'torch'")
    assert findings[-1].told.endswith("OSError: libcudart.so: not there")


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("is_broken", [True, False])
def test_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_json: bool,
    is_broken: bool,
) -> None:  # fmt: skip
    findings = [ok("one", "fine"), doubtful("two", "so so", "mend it")]
    if is_broken:
        findings.append(broken("three", "gone", "buy it"))
    monkeypatch.setattr(doctor, "examine", lambda engine_python: findings)
    assert main(["doctor", *(["--json"] if as_json else [])]) == int(is_broken)
    out = capsys.readouterr().out
    if as_json:
        told = json.loads(out)
        assert told["ok"] is not is_broken
        assert told["findings"][1] == {
            "name": "two", "state": "doubtful", "told": "so so", "fix": "mend it"
        }  # fmt: skip
    else:
        assert "two (doubtful): mend it" in out
        assert ("three (broken): buy it" in out) is is_broken
