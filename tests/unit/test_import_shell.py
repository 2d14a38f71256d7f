"""Launch scripts are played as bash would, without running anything."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from sim.interop.shell import as_written, is_unknown, read_script

SCRIPTS = {
    "variables": 'A=1; B="two words"; echo $A ${A}x "$B" $B',
    "defaults": 'A=${A:-7}; B=${B-"b c"}; : ${C:=9}; echo $A "$B" $C ${A:+set} ${NONE:+unset}',
    "arrays": 'A=(--x 1 "a b"); A+=(--y); echo ${A[@]} "${A[@]}" ${A[1]} "n${A[0]}"',
    "arithmetic": "N=4; G=8; echo $((N*G)) $(( $N + ${G} )) $((G/3)) $((-N))",
    "quotes": """A='$HOME "x"'; echo "$A" 'a'"b"c \\$A "\\$A" """,
    "continued": "echo a \\\n  b \\\n c # comment\n",
    "appended": 'O="--a 1"; O+=" --b 2"; O="$O --c"; echo $O',
    "if": 'A=fp8; if [ "$A" = "fp8" ]; then echo yes; elif [ $A = x ]; then echo x; else echo no; fi',
    "else": 'A=bf16; if [[ $A == "fp8" ]]; then echo yes; else echo no; fi; echo end',
    "elif": "N=2; if [ $N -gt 2 ]; then echo a; elif [[ $N -ge 2 && -n $N ]]; then echo b; else echo c; fi",
    "nested": "A=1; if [ $A -eq 2 ]; then if [ $A -eq 1 ]; then echo a; fi; echo b; else echo c; fi",
    "and or": "A=1; [ $A = 1 ] && echo one; [ $A = 2 ] && echo two || echo other",
    "not": 'A=; if [ ! -z "$A" ]; then echo some; else echo none; fi',
    "redirected": "echo a > /dev/null; echo b 2>&1",
    "here": "echo a\ncat <<EOF > /dev/null\necho hidden\nEOF\necho b",
    "function": "run() {\n echo $X\n}\nX=3",
    "string command": "A='b c'; bash -c \"echo $A\"",
    "empty": "echo '' \"\" x",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in ("redirected", "function")])
def test_a_script_says_what_bash_says(name: str) -> None:
    """Every echo becomes its words, one a line."""
    show = 'echo() { for word in "$@"; do printf \'%s\\n\' "<$word>"; done; }; export -f echo\n'
    bash = subprocess.run(["bash", "-c", show + SCRIPTS[name]], capture_output=True, text=True, check=False, env={})
    commands = [command for command in read_script(SCRIPTS[name]).commands if command[0].text == "echo"]
    words = [f"<{text}>" for command in commands for text, _ in command[1:]]
    assert words == bash.stdout.splitlines()


def test_redirections_are_no_words() -> None:
    assert [[w.text for w in c] for c in read_script(SCRIPTS["redirected"]).commands] == [["echo", "a"], ["echo", "b"]]


def test_a_word_knows_its_line() -> None:
    script = read_script("A=(\n --x\n 1\n)\nrun ${A[@]} --y\n")
    assert script.commands[0] == [("run", 5), ("--x", 2), ("1", 3), ("--y", 5)]


def test_what_only_a_running_shell_knows_is_marked() -> None:
    texts = [word.text for word in read_script("run $NODES $(hostname) `date` $((A*2)) ${X%.*} $1").commands[0]]
    assert [is_unknown(text) for text in texts] == [False, *[True] * 6]
    assert as_written(texts[1]) == "$NODES"


def test_undecided_conditions_and_loops_are_passed_over_and_told() -> None:
    script = read_script("if [ -d x ]; then\n run a\nfi\nfor i in 1 2; do\n run b\ndone\nrun c\n")
    assert [[word.text for word in command] for command in script.commands] == [["run", "c"]]
    assert script.undecided == [1, 4]


def test_a_variable_that_doubles_does_not_fill_the_memory() -> None:
    script = read_script("A=aaaaaaaaaaaaaaaa\n" + "A=$A$A\n" * 60 + "run $A")
    assert len(script.commands[0][-1].text) <= 1_000_000
