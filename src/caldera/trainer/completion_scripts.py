"""The scripts of `caldera completion`, but for their words."""

from __future__ import annotations

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
