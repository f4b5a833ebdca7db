"""What the documentation says is so: its commands run, its names exist, its links lead somewhere.

Commands are the fenced `bash` and `python` blocks. Those of a page run in order, in one folder,
which starts as `make demo` leaves it; Python blocks that follow each other are one program. A block
that cannot run here stands after `<!-- not executed: REASON -->`.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from caldera.config import PPOTrainerConfig, config_to_dict, known_keys, load_config
from caldera.config.loader import SCHEMAS
from caldera.config.migrate import MOVED_SUPERVISED, moved_to
from caldera.demo import run as demo
from tests.generation_trials import free_port

if TYPE_CHECKING:
    from tests.conftest import WarmPython

REPOSITORY = Path(__file__).parents[2]
TRANSLATIONS = sorted(
    path
    for pattern in ("*.zh.md", "docs/**/*.zh.md", "examples/**/*.zh.md")
    for path in REPOSITORY.glob(pattern)
)
PAGES = [
    REPOSITORY / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted((REPOSITORY / "docs/algorithms").glob("*.md")),
    *sorted((REPOSITORY / "docs/reference").glob("*.md")),
    *sorted((REPOSITORY / "examples").glob("**/README.md")),
]
PAGES = [page for page in PAGES if page not in TRANSLATIONS]
TEXTS = [
    *PAGES,
    *TRANSLATIONS,
    *sorted((REPOSITORY / "docs/adr").glob("*.md")),
    *(REPOSITORY / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "THIRD_PARTY.md")),
]
EXAMPLES = sorted(
    set((REPOSITORY / "examples").glob("*/*.yaml"))
    - {*(REPOSITORY / "examples").glob("*/tools.yaml")}
)
PORT = "8765"
"""Of the server that pages start; on this machine somebody may have it."""
REASONS = {
    "a fragment", "installs packages", "needs a cluster", "needs a GPU", "needs Docker",
    "runs until it is stopped", "takes minutes",
}  # fmt: skip
BLOCK = re.compile(
    r"^(?:<!-- not executed: (?P<reason>.+?) -->\n+)?```(?P<language>bash|python)\n"
    r"(?P<script>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)")


def blocks(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text(encoding="utf-8")))


def code_spans(page: Path) -> list[str]:
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    return re.findall(r"`([^`\n]+)`", prose)


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


# ---------------------------------------------------------------------- commands


def run_script(script: str, folder: Path, warm: WarmPython | None = None) -> None:
    """Run the lines in a shell that finds the `caldera` and `python3` of these tests.

    With `warm`, `caldera` is called in processes that have imported everything already.
    """
    programs = folder / ".bin"  # for an environment in which Caldera is not installed
    programs.mkdir(exist_ok=True)
    entry_point = programs / "caldera"
    python = warm.command("caldera.cli") if warm else [sys.executable, "-m", "caldera.cli"]
    entry_point.write_text(f'#!/bin/sh\nexec {shlex.join(python)} "$@"\n')
    entry_point.chmod(0o755)
    installed = Path(sys.executable).parent
    places = (programs, installed) if warm else (installed, programs)
    own = {k: v for k, v in os.environ.items() if not k.startswith(("VERL_", "CALDERA_"))}
    environment = own | {
        "CALDERA_CACHE": str(folder / ".cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([*map(str, places), own["PATH"]]),
        "PYTHONPATH": str(REPOSITORY / "src"),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder, env=environment, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"


def run_block(script: str, language: str, folder: Path, warm: WarmPython | None) -> None:
    if language == "python":
        (folder / "snippet.py").write_text(script, encoding="utf-8")
        python = warm.command("snippet") if warm else [sys.executable, "snippet.py"]
        script = shlex.join(python)
    run_script(script.replace(PORT, str(free_port())), folder, warm)


def executed(page: Path) -> Iterator[tuple[str, str]]:
    """Scripts and their language, in order."""
    waiting = ""
    for block in blocks(page):
        if block["reason"]:
            continue
        if block["language"] == "python":
            waiting += block["script"]
            continue
        if waiting:
            yield waiting, "python"
        waiting = ""
        yield block["script"], "bash"
    if waiting:
        yield waiting, "python"


@pytest.fixture(scope="module")
def after_make_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `make demo` leaves it, but for the number of steps."""
    folder = tmp_path_factory.mktemp("after_make_demo")
    run_script("caldera demo trainer.total_training_steps=2", folder)
    before, _ = demo.accuracies(folder / "outputs/demo-tiny/run/metrics.jsonl")
    assert 0.25 < before < 0.55  # so that there is something to learn
    shutil.copytree(REPOSITORY / "examples", folder / "examples")
    return folder


EXECUTED = [page for page in PAGES if any(not block["reason"] for block in blocks(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page", EXECUTED, ids=name)
def test_the_commands_of_a_page_run(
    page: Path, after_make_demo: Path, warm: WarmPython, tmp_path: Path
) -> None:
    """Those of the first page as they are, so that the installed `caldera` is among them."""
    shutil.copytree(after_make_demo, tmp_path, dirs_exist_ok=True)
    for script, language in executed(page):
        run_block(script, language, tmp_path, None if page == PAGES[0] else warm)
    assert logged_names(tmp_path)
    undocumented = [n for n in logged_names(tmp_path) if not is_documented_metric(n)]
    assert undocumented == [], "these metrics are not in docs/metrics.md"


def test_the_pages_with_commands_are_found() -> None:
    assert {"README.md", "docs/quickstart.md"} <= {name(page) for page in EXECUTED}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_is_not_executed_has_a_reason(page: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- not executed:") == sum(bool(block["reason"]) for block in blocks(page))
    assert text.count("```bash") + text.count("```python") == len(blocks(page))
    for block in blocks(page):
        assert block["reason"] is None or block["reason"] in REASONS
        called = re.findall(r"^make ([a-z0-9-]+)", block["script"], re.MULTILINE)
        assert set(called) <= targets
        assert block["reason"] or not called, "a page's folder has no Makefile"


# ---------------------------------------------------------------------- names


def logged_names(folder: Path) -> set[str]:
    lines = (
        line for path in folder.rglob("metrics.jsonl") for line in path.read_text().splitlines()
    )
    return {metric for line in lines for metric in json.loads(line)["data"]}


def is_documented_metric(metric: str) -> bool:
    return any(re.fullmatch(pattern, metric) for pattern in metric_patterns())


def metric_patterns() -> Iterator[str]:
    """docs/metrics.md's names as regular expressions: {a,b} is a choice, capitals stand for any."""
    any_of = {
        "SOURCE": ".+", "STATISTIC": r"\w+", "VARIABLE": "[^/]+", "KEY": "[^/]+", "@N": r"@\d+",
    }  # fmt: skip
    for row in (REPOSITORY / "docs/metrics.md").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| `([^`]+)` \|", row):
            choice = re.sub(r"\{([^}]*)\}", lambda m: f"(?:{m[1].replace(',', '|')})", match[1])
            yield re.sub("|".join(any_of), lambda m: any_of[m[0]], choice)


@pytest.mark.parametrize(
    "page", [page for page in TEXTS if page.parent.name != "reference"], ids=name
)
def test_keys_exist(page: Path) -> None:
    """In one command or another."""
    keys = {key: free for schema in SCHEMAS.values() for key, free in known_keys(schema).items()}
    keys |= dict.fromkeys(MOVED_SUPERVISED, False)
    roots = {key.partition(".")[0] for key in keys}
    groups = {key[: dot.start()] for key in keys for dot in re.finditer(r"\.", key)}
    free = tuple(f"{key}." for key, is_free in keys.items() if is_free)
    for span in code_spans(page):
        match = re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)+)(?:=.*)?", span)
        if not match or match[1].partition(".")[0] not in roots or span.endswith((".pt", ".py")):
            continue
        key = match[1]
        is_known = key in keys or key in groups or key.startswith(free)
        moved = {moved_to(key), moved_to(key, MOVED_SUPERVISED)}
        assert is_known or moved & keys.keys(), f"no key {key}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["write_hardware_table.py", "write_models_table.py"])
def test_the_tables_are_up_to_date(name: str) -> None:
    check_is_up_to_date(name)


@pytest.mark.parametrize("name", ["write_reference.py", "write_api.py"])
def test_the_reference_is_up_to_date(name: str) -> None:
    check_is_up_to_date(name)


def test_the_names_beside_those_of_trl_exist() -> None:
    """Keywords and config keys of the page's second column."""
    from caldera import api
    from caldera.api.settings import RL_KEYS, RUN_KEYS, settings

    page = REPOSITORY / "docs/from_trl.md"
    cells = re.findall(r"^\| [^|]+ \| ([^|]+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    taken = {
        name for call in (api.grpo, api.sft, api.dpo) for name in inspect.signature(call).parameters
    }
    keywords = set(re.findall(r"[`( ](\w+)(?==|`|, `)", " ".join(cells)))
    asked = {name for name in keywords if name in taken}
    assert {"reward", "lora_rank", "reward_weights", "beta", "max_length"} <= asked
    for assignment in re.findall(r"`([^`]+=[^`]*)`", " ".join(cells)):
        for name in re.findall(r"(\w+)=(?!=)", assignment):
            if name not in taken and "." not in assignment:
                assert settings(PPOTrainerConfig, RUN_KEYS | RL_KEYS, {name: 1}, None), name


def check_is_up_to_date(name: str) -> None:
    script = REPOSITORY / "scripts" / name
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    done = subprocess.run(
        [sys.executable, script, "--check"], env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_files_of_the_package_exist(page: Path) -> None:
    for span in code_spans(page):
        if re.fullmatch(r"[\w/]+/\w+\.py", span):
            package = REPOSITORY / "src/caldera"
            roots = (REPOSITORY, package, package / "rollout")
            assert any((root / span).is_file() for root in roots), f"no file {span}"


# ---------------------------------------------------------------------- links


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.finditer(FENCED.sub("", page.read_text(encoding="utf-8"))):
        target = (page.parent / link[1]).resolve() if link[1] else page
        assert target.is_relative_to(REPOSITORY) and target.exists(), f"no file {link[1]}"
        if link[2]:
            assert link[2] in anchors(target), f"no heading {link[2]} in {link[1]}"


@pytest.mark.parametrize("page", PAGES[1:], ids=name)
def test_the_site_has_a_place_for_the_page(page: Path) -> None:
    places = re.findall(r"^ +- (\S+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE)
    assert name(page).removeprefix("docs/") in places, "add it to `nav` in mkdocs.yml"


def anchors(page: Path) -> set[str]:
    """Of its headings, and those that stand in it."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        *(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings),
        *re.findall(r'^<a id="([^"]+)"></a>$', text, re.MULTILINE),
    }


# ---------------------------------------------------------------------- examples


def load_example(path: Path, *overrides: str) -> PPOTrainerConfig:
    return load_config(overrides, path.stem, str(path.parent))


@pytest.mark.parametrize("path", EXAMPLES, ids=name)
def test_every_example_loads_and_has_a_page(path: Path) -> None:
    assert load_example(path).trainer.default_local_dir
    assert (path.parent / "README.md").is_file()


def test_the_arithmetic_example_is_the_demo() -> None:
    """So the numbers of the demo are the example's."""
    example = load_example(REPOSITORY / "examples/grpo_arithmetic/grpo_arithmetic.yaml")
    files = [
        "data.train_files=outputs/demo-tiny/train.parquet",
        "data.val_files=outputs/demo-tiny/test.parquet",
        "actor_rollout_ref.model.path=outputs/demo-tiny/start",
    ]
    of_demo = config_to_dict(load_config([*demo.COMMON, *demo.TINY, *files]))
    of_example = config_to_dict(example)
    for config in (of_demo, of_example):  # where and how often things are written
        kept: dict[str, Any] = config["trainer"]
        for key in (
            "project_name", "experiment_name", "default_local_dir", "validation_data_dir",
            "save_freq", "resume_mode",
        ):  # fmt: skip
            del kept[key]
    assert of_example == of_demo
