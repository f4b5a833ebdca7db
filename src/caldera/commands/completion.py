"""`caldera completion`: scripts that complete commands, options, config keys and their choices.

The words are part of the script, so that completing starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from caldera.config.fields import walk
from caldera.registry import Registry

# ---- The scripts of `caldera completion`, but for their words

_TABLES = """\
_caldera_words() {
    case "$1" in
@WORDS@
    esac
}

_caldera_choices() {
    case "$1" in
@CHOICES@
    esac
}
"""

BASH = (
    """\
# Completion of `caldera` in bash; made by `caldera completion bash`.
"""
    + _TABLES
    + """
_caldera() {
    local line word command previous choices count
    local -a given
    COMPREPLY=()
    # Not COMP_WORDS, which are cut at every equals sign.
    line=${COMP_LINE:0:COMP_POINT}
    word=${line##*[[:space:]]}
    read -ra given <<<"$line"
    [[ -z $word ]] && given+=("")
    count=${#given[@]}
    command=${given[1]}
    previous=${given[count - 2]}
    if ((count == 2)); then
        COMPREPLY=($(compgen -W "$(_caldera_words commands)" -- "$word"))
        return
    fi
    if [[ $word == *=* ]]; then
        choices=$(_caldera_choices "$command ${word%%=*}")
        if [[ -n $choices ]]; then
            COMPREPLY=($(compgen -W "$choices" -- "${word#*=}"))
        else
            compopt -o filenames 2>/dev/null
            COMPREPLY=($(compgen -f -- "${word#*=}"))
        fi
        # Where words are not cut at equals signs, a reply stands for all of the word.
        [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${COMPREPLY[@]/#/${word%%=*}=}")
        return
    fi
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$(_caldera_words "$command options")" -- "$word"))
        return
    fi
    choices=$(_caldera_choices "$command $previous")
    if [[ $previous == --* && -n $choices ]]; then
        COMPREPLY=($(compgen -W "$choices" -- "$word"))
        return
    fi
    COMPREPLY=($(compgen -W "$(_caldera_words "$command words")" -- "$word"))
    ((${#COMPREPLY[@]})) && return
    COMPREPLY=($(compgen -W "$(_caldera_words "$command keys")" -S = -- "$word"))
    if ((${#COMPREPLY[@]})); then
        compopt -o nospace 2>/dev/null
    else
        compopt -o filenames 2>/dev/null
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}

complete -F _caldera caldera
"""
)

ZSH = (
    """\
#compdef caldera
# Completion of `caldera` in zsh; made by `caldera completion zsh`.
"""
    + _TABLES
    + """
_caldera() {
    local command=$words[2] previous=$words[CURRENT-1] choices key
    if ((CURRENT == 2)); then
        compadd -- ${=$(_caldera_words commands)}
        return
    fi
    if [[ $PREFIX == *=* ]]; then
        key=${PREFIX%%=*}
        choices=$(_caldera_choices "$command $key")
        compset -P '*='
        if [[ -n $choices ]]; then compadd -- ${=choices}; else _files; fi
        return
    fi
    if [[ $PREFIX == -* ]]; then
        compadd -- ${=$(_caldera_words "$command options")}
        return
    fi
    choices=$(_caldera_choices "$command $previous")
    if [[ $previous == --* && -n $choices ]]; then
        compadd -- ${=choices}
        return
    fi
    compadd -- ${=$(_caldera_words "$command words")}
    compadd -S = -- ${=$(_caldera_words "$command keys")} || _files
}

if [[ $funcstack[1] == _caldera ]]; then _caldera "$@"; else compdef _caldera caldera; fi
"""
)

FISH = """\
# Completion of `caldera` in fish; made by `caldera completion fish`.
function __caldera_keys -a command
    set -l token (commandline -ct)
    set -l key (string split -m1 = -- $token)[1]
    if string match -q -- '*=*' $token
        switch "$command $key"
{choices}
        end
        return
    end
    switch $command
{keys}
    end
end

{commands}
"""


SHELLS = ("bash", "zsh", "fish")

Choices = dict[str, tuple[str, ...]]
"""Names with the values that they take, as far as those can be listed."""


@dataclass(frozen=True)
class CommandWords:
    """What can follow a command."""

    help: str
    words: tuple[str, ...] = ()
    """Commands below it, or what its first argument can be."""
    options: Choices = field(default_factory=dict)
    keys: Choices = field(default_factory=dict)


def words_of(help: str, parser: argparse.ArgumentParser, schema: type | None) -> CommandWords:
    """What a command's parser takes, and the keys of its config."""
    words: list[str] = []
    options: Choices = {}
    for action in _actions(parser):
        choices = tuple(str(choice) for choice in action.choices or ())
        if not action.option_strings:
            words += choices
        elif action.help is not argparse.SUPPRESS:
            options |= {name: choices for name in action.option_strings if name.startswith("--")}
    return CommandWords(help, tuple(words), options, {} if schema is None else _keys(schema))


def completion_script(shell: str, commands: Mapping[str, CommandWords]) -> str:
    """The script for one of SHELLS."""
    if shell == "fish":
        return FISH.format(
            commands="\n".join(_fish_command(name, words) for name, words in commands.items()),
            keys="\n".join(_fish_keys(n, words) for n, words in commands.items() if words.keys),
            choices="\n".join(_fish_choices(name, words.keys) for name, words in commands.items()),
        )
    template = BASH if shell == "bash" else ZSH
    lists = {"commands": tuple(commands)}
    choices: Choices = {}
    for name, words in commands.items():
        lists |= {f"{name} words": words.words, f"{name} options": tuple(words.options)}
        lists |= {f"{name} keys": tuple(words.keys)}
        given = (words.options | words.keys).items()
        choices |= {f"{name} {word}": takes for word, takes in given}
    return template.replace("@WORDS@", _cases(lists)).replace("@CHOICES@", _cases(choices))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The parser's arguments and those of the commands below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)


def _keys(schema: type) -> Choices:
    """The keys that are honoured."""
    registered = {registry.kind: tuple(registry.names()) for registry in _registries()}
    found: Choices = {}
    for key, about, _ in walk(schema()):
        if "refused" in about.metadata:
            continue
        choices = tuple(str(choice) for choice in about.metadata.get("choices") or ())
        if str(about.type).startswith("bool"):
            choices = ("true", "false")
        found[key] = choices or registered.get(key, ())
    return found


def _registries() -> tuple[Registry[Any], ...]:
    """Those that are named after the key that chooses from them."""
    from caldera.core_algos import ADV_ESTIMATORS, POLICY_LOSSES  # torch takes seconds to import
    from caldera.rollout import ROLLOUTS

    return ADV_ESTIMATORS, POLICY_LOSSES, ROLLOUTS


# ---------------------------------------------------------------------- bash and zsh


def _cases(lists: Choices) -> str:
    """Branches of a shell's `case`, one for each list, with all names that have it."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, words in lists.items():
        if words:
            names.setdefault(words, []).append(f"'{name}'")
    return "\n".join(
        f"        {'|'.join(whose)}) echo '{' '.join(words)}' ;;" for words, whose in names.items()
    )


# ---------------------------------------------------------------------- fish


def _fish_command(name: str, words: CommandWords) -> str:
    told = words.help.replace("'", "\\'")
    after = f"complete -c caldera -n '__fish_seen_subcommand_from {name}'"
    lines = [f"complete -c caldera -n __fish_use_subcommand -a {name} -d '{told}'"]
    if words.words:
        lines.append(f"{after} -a '{' '.join(words.words)}'")
    for option, choices in words.options.items():
        takes = f" -x -a '{' '.join(choices)}'" if choices else ""
        lines.append(f"{after} -l {option.removeprefix('--')}{takes}")
    if words.keys:
        lines.append(f"{after} -a '(__caldera_keys {name})'")
    return "\n".join(lines)


def _fish_keys(name: str, words: CommandWords) -> str:
    return f"        case {name}\n            printf '%s=\\n' {' '.join(words.keys)}"


def _fish_choices(name: str, keys: Choices) -> str:
    by_choices: dict[tuple[str, ...], list[str]] = {}
    for key, choices in keys.items():
        if choices:
            by_choices.setdefault(choices, []).append(f"'{name} {key}'")
    return "\n".join(
        f'        case {" ".join(whose)}\n            printf "$key=%s\\n" {" ".join(choices)}'
        for choices, whose in by_choices.items()
    )
