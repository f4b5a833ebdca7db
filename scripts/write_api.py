"""Write docs/reference/api.md, the Python API, from signatures and docstrings.

python scripts/write_api.py           write the page
python scripts/write_api.py --check   fail if it is not up to date
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import caldera
from caldera import api

PAGE = Path(__file__).parents[1] / "docs/reference/api.md"
TRAININGS = ("grpo", "ppo", "sft", "dpo")
TYPES = ("Dataset", "Reward", "Callback")
LONGEST = 88
ROLE = re.compile(r"`(\w+)`")


def page() -> str:
    names = [name for name in caldera.__all__ if not name.startswith("_")]
    functions = [*TRAININGS, *(n for n in ("evaluate", "generate", "tool") if n in names)]
    documented = {*functions, "Run", "DataProto", "StopTraining"}
    assert documented == set(names), f"write about {documented ^ set(names)}"
    return f"""# Python API

<!-- Written by scripts/write_api.py from signatures and docstrings. -->

Train, score and sample from Python: in a script, in a notebook, in memory. `caldera` has these
names, and a test pins them.

```python
import caldera
from caldera.demo import tiny_model

numbers = range(10, 30)
rows = [{{"prompt": f"{{a}}+{{b}}", "answer": str(a + b)}} for a in numbers for b in numbers]


def reward(response, answer):
    return float(response == answer)


run = caldera.grpo(tiny_model("tiny"), rows, reward, lr=5e-4, batch_size=16, steps=2)
run.train()
print(run.metrics[-1]["critic/score/mean"], run.generate(["12+13"]))
```

{chr(10).join(function(name, getattr(caldera, name)) for name in TRAININGS)}
{run_class()}
{chr(10).join(function(name, getattr(caldera, name)) for name in functions[len(TRAININGS) :])}
## caldera.StopTraining

{paragraphs(inspect.getdoc(caldera.StopTraining) or "")}

## caldera.DataProto

The batch that phases of a step read and extend: [its page](../batch.md).

## Types

{chr(10).join(type_alias(name) for name in TYPES)}"""


def function(name: str, value: Callable[..., Any], level: int = 2) -> str:
    heading = f"{'#' * level} caldera.{name}"
    return f"{heading}\n\n{described(name, value)}\n"


def described(name: str, value: Callable[..., Any]) -> str:
    text, arguments = split(inspect.getdoc(value) or "")
    return "\n\n".join(
        part for part in (f"```text\n{signature(name, value)}\n```", text, arguments) if part
    )


def signature(name: str, value: Callable[..., Any], is_method: bool = False) -> str:
    """On one line, or with a parameter on each."""
    inspected = inspect.signature(value)
    parameters = list(inspected.parameters.values())[int(is_method) :]
    shown: list[str] = []
    has_star = False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            shown.append("*")
        has_star |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        shown.append(str(parameter).replace("'", ""))
    returned = inspected.return_annotation
    after = "" if returned is inspected.empty else f" -> {str(returned).strip(chr(39))}"
    line = f"{name}({', '.join(shown)}){after}"
    if len(line) <= LONGEST:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){after}"


def split(doc: str) -> tuple[str, str]:
    """The text of a docstring, and its `Args:` as a table."""
    text, _, rest = doc.partition("\nArgs:\n")
    rows, tail = [], ""
    for block in re.split(r"\n(?=    \S)", textwrap.dedent(rest) and "\n" + rest)[1:]:
        name, _, meaning = block.strip().partition(":")
        rows.append(f"| `{name}` | {' '.join(meaning.split())} |")
    table = "\n".join(["| argument | is |", "| -- | -- |", *rows]) if rows else ""
    return paragraphs(text + tail), table


def paragraphs(text: str) -> str:
    return text.strip()


def run_class() -> str:
    parts = [f"## caldera.Run\n\n{paragraphs(inspect.getdoc(caldera.Run) or '')}"]
    for name, value in vars(caldera.Run).items():
        if name.startswith("_") or not (callable(value) or isinstance(value, property)):
            continue
        if isinstance(value, property):
            assert value.fget is not None
            returned = inspect.signature(value.fget).return_annotation
            head, doc = f"run.{name}: {str(returned).strip(chr(39))}", inspect.getdoc(value)
        else:
            head, doc = signature(f"run.{name}", value, is_method=True), inspect.getdoc(value)
        parts.append(f"```text\n{head}\n```\n\n{paragraphs(doc or '')}".strip())
    return "\n\n".join(parts) + "\n"


def type_alias(name: str) -> str:
    """An alias with the string under it."""
    for path in sorted(Path(inspect.getfile(api)).parent.glob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for statement, after in itertools.pairwise(body):
            target = (
                statement.targets[0]
                if isinstance(statement, ast.Assign)
                else statement.target
                if isinstance(statement, ast.AnnAssign)
                else None
            )
            if not isinstance(target, ast.Name) or target.id != name:
                continue
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), name
            doc = inspect.cleandoc(str(after.value.value))
            assert isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None
            code = f"{name} = {ast.unparse(statement.value)}"
            return f"### {name}\n\n```text\n{code}\n```\n\n{paragraphs(doc)}\n"
    raise AssertionError(f"{name} is not in caldera.api")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is not up to date")
    is_check = parser.parse_args().check
    text = page()
    if not is_check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is not up to date: run python scripts/write_api.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
