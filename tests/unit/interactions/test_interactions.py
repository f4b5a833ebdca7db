"""Interactions: what they answer, how they score, and the file that names them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from caldera.errors import ConfigError, DataError
from caldera.interactions.base import BaseInteraction, Conversation, load_interactions
from caldera.interactions.gsm8k_interaction import Gsm8kInteraction
from caldera.interactions.scripted import ScriptedInteraction

OURS = "caldera.interactions.gsm8k_interaction.Gsm8kInteraction"


def wait_for(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def say(interaction: BaseInteraction, name: str, text: str) -> Any:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    return wait_for(interaction.generate_response(name, messages))


def test_gsm8k_says_whether_an_answer_is_right() -> None:
    teacher = Gsm8kInteraction({"name": "gsm8k"})
    name = wait_for(teacher.start_interaction(ground_truth="18", query="?"))
    is_over, text, score, _ = say(teacher, name, "It is #### 17")
    assert (is_over, score) == (False, 0.0) and "incorrect" in text
    assert say(teacher, name, "18")[2] == 0.0, "the answer stands after ####"
    assert say(teacher, name, "#### 18")[:3] == (True, "Your response is correct!", 1.0)
    assert wait_for(teacher.calculate_score(name)) == 1.0
    wait_for(teacher.finalize_interaction(name))
    assert teacher._truths == {}


def test_gsm8k_needs_the_truth() -> None:
    with pytest.raises(DataError, match=r"extra_info\.interaction_kwargs\.ground_truth"):
        wait_for(Gsm8kInteraction({"name": "gsm8k"}).start_interaction(ground_truth=None))


def test_conversations_of_one_script_go_on_by_themselves() -> None:
    partner = ScriptedInteraction(
        {"name": "quiz", "turns": [{"say": "and?", "expect": "^y", "score": 1}, {"say": "bye"}]}
    )
    first, second = (wait_for(partner.start_interaction()) for _ in range(2))
    assert say(partner, first, "yes") == (False, "and?", 1, {"met": True})
    assert say(partner, second, "no") == (False, "and?", 0.0, {"met": False})
    assert say(partner, first, "x") == (True, "bye", 0.0, {"met": True})
    assert wait_for(partner.calculate_score(first)) == 1


def test_a_row_may_bring_its_own_script() -> None:
    partner = ScriptedInteraction({"name": "quiz"})
    # Columns of parquet files hold None for what a turn does not say.
    name = wait_for(partner.start_interaction(turns=[{"say": "a", "expect": None, "score": 2.0}]))
    assert say(partner, name, "x") == (True, "a", 2.0, {"met": True})
    with pytest.raises(ConfigError, match="has no turns"):
        wait_for(partner.start_interaction())


@pytest.mark.parametrize(
    "turns",
    [
        [], "x", [{"sya": "x"}], [{"expect": "("}], [{"expect": 42}], [{"say": 42}],
        [{"score": "high"}], [{"otherwise": float("nan")}],
    ],
)  # fmt: skip
def test_mistakes_in_a_script(turns: Any) -> None:
    with pytest.raises(ConfigError, match=r"quiz: config\.turns"):
        ScriptedInteraction({"name": "quiz", "turns": turns})


def load(folder: Path, text: str) -> dict[str, BaseInteraction]:
    (folder / "file.yaml").write_text(text)
    return load_interactions(str(folder / "file.yaml"))


def test_files_name_interactions(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        "interaction:\n"
        "- class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction\n  config: {}\n"
        "- {name: quiz, class_name: caldera.interactions.scripted.ScriptedInteraction,\n"
        "   config: {turns: [{say: hello}]}}\n",
    )
    assert list(found) == ["gsm8k", "quiz"]
    assert isinstance(found["gsm8k"], Gsm8kInteraction)
    assert found["quiz"].config == {"turns": [{"say": "hello"}], "name": "quiz"}
    assert load_interactions(None) == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1", "must hold a list under 'interaction'"),
        ("interaction: [{name: a}]", "class_name is missing.*file.py:MyInteraction"),
        (
            "interaction: [{class_name: Polite}]",
            "names no class; .*BaseInteraction.*file.py:",
        ),
        ("interaction: [{class_name: polite.py}]", "names no class; takes .*file.py:MyClass"),
        ("interaction: [{class_name: no.such.Kind}]", "No module named.*file.py:MyClass"),
        (f"interaction: [{{class_name: {OURS}, colour: 1}}]", "takes a mapping of name"),
        (
            f"interaction: [{{class_name: {OURS}}}, {{class_name: {OURS}}}]",
            "'gsm8k' is there twice",
        ),
        ("interaction: [{class_name: json.JSONDecoder}]", "derived from BaseInteraction"),
        ("interaction: {", "not valid YAML"),
        (f"interaction: [{{class_name: {OURS}, config: [1]}}]", "config=.*takes a mapping"),
        (f"interaction: [{{class_name: {OURS}, config: {{timeot: 1}}}}]", "timeot is unknown"),
        (
            "interaction: [{class_name: caldera.interactions.base.BaseInteraction}]",
            "it has no generate_response",
        ),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"interaction_config_path=.*{problem}"):
        load(tmp_path, text)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_interactions("nowhere.yaml")


def test_a_class_that_extends_one_of_ours_may_have_keys_of_its_own() -> None:
    class Strict(Gsm8kInteraction):
        pass

    assert Strict({"name": "strict", "patience": 3}).config["patience"] == 3


@pytest.mark.parametrize("timeout", [0, "soon", True])
def test_timeouts_are_seconds(timeout: Any) -> None:
    with pytest.raises(ConfigError, match=r"quiz: config\.timeout="):
        ScriptedInteraction({"name": "quiz", "timeout": timeout})
    assert ScriptedInteraction({"name": "quiz", "timeout": None}).timeout is None
    assert ScriptedInteraction({"name": "quiz"}).timeout == 600


class Odd(BaseInteraction):
    """Replies what it was given, or raises it."""

    def __init__(self, reply: Any) -> None:
        super().__init__({"name": "odd"})
        self.reply = reply

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        if isinstance(self.reply, BaseException):
            raise self.reply
        return self.reply


def answer_of(reply: Any) -> tuple[tuple[bool, str, float | None], dict[str, int]]:
    conversation = Conversation(Odd(reply), "id", {"interaction_kwargs": {}})
    return wait_for(conversation.answer([])), conversation.failures


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ((True, None, 1.0, {}), (True, "", 1.0)),
        ((False, "and?", None, {}), (False, "and?", None)),
        ([False, "and?", 0.5, {}], (False, "and?", 0.5)),
    ],
)
def test_replies_that_say_less_are_fine(reply: Any, answer: tuple[bool, str, float | None]) -> None:
    assert answer_of(reply) == (answer, {})


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ((False, None, 1.0, {}), "an answer must be text, got a NoneType"),
        ((True, 1, 1.0, {}), "an answer must be text, got a int"),
        ((True, "a", float("nan"), {}), "is not finite"),
        ("abcd", "must return"),
        (asyncio.CancelledError(), "given up"),
    ],
)
def test_replies_that_are_none(reply: Any, told: str) -> None:
    (is_over, text, score), failures = answer_of(reply)
    assert (is_over, score, failures) == (False, 0.0, {"error": 1})
    assert text.startswith("Error when answering: ") and told in text


def test_a_trajectory_that_is_cancelled_ends() -> None:
    class Silent(Odd):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

    asked = asyncio.Event()

    async def give_up() -> None:
        conversation = Conversation(Silent(None), "id", {"interaction_kwargs": {}})
        answering = asyncio.create_task(conversation.answer([]))
        await asked.wait()
        answering.cancel()
        await asyncio.wait([answering])
        assert answering.cancelled() and conversation.failures == {}

    asyncio.run(give_up())
