"""What a launch script runs: bash variables, arrays, defaults and simple conditions played, everything else passed over.

Nothing is executed. What only a running shell knows (`$SLURM_NNODES`, `$(nvidia-smi ...)`) stays marked as unknown; a
condition on it counts as false, and that is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sim.interop.shell_tests import arithmetic, decide
from sim.interop.shell_words import ASSIGNMENT, NAME, Part, Token, Word, tokens_of

UNKNOWN_BEGIN, UNKNOWN_END = "\ue000", "\ue001"
LONGEST_VALUE = 1_000_000
DECLARES = ("export", "declare", "readonly", "local", "typeset")
LOOPS = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
SLURM = re.compile(r"^#SBATCH\s+(--?[\w-]+)(?:[= ]\s*(\S+))?", re.M)


class Text(NamedTuple):
    """A word after expansion, and the line where it was written."""

    text: str
    line: int


@dataclass(slots=True)
class Script:
    """`commands`: every simple command that would run; `undecided`: lines of conditions, loops and cases that nobody can
    follow without running them; `slurm`: the options of #SBATCH lines."""

    commands: list[list[Text]] = field(default_factory=list)
    undecided: list[int] = field(default_factory=list)
    slurm: dict[str, Text] = field(default_factory=dict)


def read_script(text: str, variables: Mapping[str, str] | None = None) -> Script:
    """Plays a script. `variables`: what its environment holds ("NNODES", or "1" for its first argument)."""
    script = Script()
    for match in SLURM.finditer(text):
        script.slurm[match[1].lstrip("-")] = Text(match[2] or "", text[: match.start()].count("\n") + 1)
    shell = _Shell(script, {name: Text(value, 0) for name, value in (variables or {}).items()})
    shell.play(tokens_of(text))
    return script


def is_unknown(text: str) -> bool:
    """Does it hold something that only a running shell knows?"""
    return UNKNOWN_BEGIN in text


def as_written(text: str) -> str:
    """The text for people: what is unknown as it stands in the script."""
    return text.replace(UNKNOWN_BEGIN, "").replace(UNKNOWN_END, "")


def _unknown(text: str) -> str:
    return f"{UNKNOWN_BEGIN}{text}{UNKNOWN_END}"


class _Shell:
    def __init__(self, script: Script, variables: Mapping[str, Text], depth: int = 0) -> None:
        self.script = script
        self.variables: dict[str, Text | list[Text]] = dict(variables)
        self.branches: list[_Branch] = []
        self.depth = depth

    def play(self, tokens: list[Token]) -> None:
        """All statements in order; `status` is what && and || ask for, None where it cannot be known."""
        status: bool | None = True
        joined = ""
        for words, after in _statements(tokens):
            skipped = (joined == "&&" and status is False) or (joined == "||" and status is not False)
            if not skipped:
                status = self.statement(words)
            joined = after

    @property
    def active(self) -> bool:
        return all(branch.active for branch in self.branches)

    def statement(self, words: list[Word]) -> bool | None:
        """One statement, keywords first."""
        while words:
            keyword = words[0].literal
            if keyword in LOOPS:
                self.note(words[0])
                self.branches.append(_Branch(LOOPS[keyword], active=False))
                return True
            if keyword == "if":
                self.branches.append(_Branch("fi", active=True))
            elif keyword in ("then", "elif", "else") and self.branches and self.branches[-1].ends == "fi":
                self.branches[-1].turn(keyword)
            elif keyword in ("fi", "done", "esac") and self.branches and self.branches[-1].ends == keyword:
                self.branches.pop()
            elif keyword == "function" and len(words) > 1:
                words = words[1:]
            elif keyword not in ("{", "}", "!", "time", "do"):
                break
            words = words[1:]
        if not words or not self.active:
            return True
        status = self.simple(words)
        if self.branches and self.branches[-1].is_asked:
            if status is None:
                self.note(words[0])
            self.branches[-1].condition = status is True
        return status

    def note(self, word: Word) -> None:
        if self.active and word.line not in self.script.undecided:
            self.script.undecided.append(word.line)

    def simple(self, words: list[Word]) -> bool | None:
        """Assignments, tests and commands."""
        if words[0].literal in DECLARES:
            words = [word for word in words[1:] if not (word.literal or "").startswith("-")]
        while words and self.assign(words[0]):
            words = words[1:]
        if not words:
            return True
        fields = list(self.expand_all(words))
        if not fields:
            return True
        if fields[0].text in ("[", "[[", "test"):
            return decide([text for text, _ in fields], is_unknown)
        if (inner := _inner_command(fields)) is not None:
            return self.again(inner)
        self.script.commands.append(fields)
        return {"false": False}.get(fields[0].text, True)

    def again(self, text: str) -> bool:
        """A command in a string, with the same variables; its lines are not known apart."""
        if self.depth < 4:
            _Shell(self.script, {k: v for k, v in self.variables.items() if isinstance(v, Text)}, self.depth + 1).play(
                tokens_of(text)
            )
        return True

    def assign(self, word: Word) -> bool:
        """NAME=value, NAME+=value, NAME=( ... ); False for a word that is none of these."""
        text = ""
        for part in word.parts:
            if part.kind != "text" or part.quoted or "=" in text:
                break
            text += part.text
        match = ASSIGNMENT.match(text)
        if match is None:
            return False
        name, appends = match[1], bool(match[3])
        if word.array is not None:
            elements = list(self.expand_all(word.array))
            old = self.variables.get(name)
            before = [] if not appends or old is None else old if isinstance(old, list) else [old]
            self.variables[name] = [*before, *elements]
            return True
        value = self.joined(_after(word.parts, match.end()))
        if appends:
            old = self.variables.get(name, Text("", word.line))
            if isinstance(old, list):
                old[:1] = [Text(old[0].text + value, old[0].line)] if old else [Text(value, word.line)]
                return True
            value = old.text + value
        self.variables[name] = Text(value[:LONGEST_VALUE], word.line)
        return True

    def joined(self, parts: Iterable[Part]) -> str:
        """Parts as one text, as in double quotes."""
        return "".join(part.text if part.kind == "text" else self.value(part, 0).text for part in parts)[:LONGEST_VALUE]

    def expand_all(self, words: Iterable[Word]) -> Iterator[Text]:
        total = 0
        for word in words:
            for text in self.expand(word):
                total += len(text.text) + 1
                if total > LONGEST_VALUE:
                    return
                yield text

    def expand(self, word: Word) -> Iterator[Text]:
        """One word as fields: unquoted values are split at blanks, arrays are an element each."""
        current: Text | None = None
        for part in word.parts:
            pieces, begins_apart, ends_apart = self.pieces(part, word.line)
            for number, piece in enumerate(pieces):
                if (number or begins_apart) and current is not None:
                    yield current
                    current = None
                current = piece if current is None else Text(current.text + piece.text, current.line)
            if ends_apart and current is not None:
                yield current
                current = None
        if current is not None:
            yield current

    def pieces(self, part: Part, line: int) -> tuple[list[Text], bool, bool]:
        """Fields that a part makes; whether they are apart from what is before and after the part."""
        if part.kind == "text":
            return [Text(part.text, line)], False, False
        elements = self.elements(part)
        if elements is not None:
            split = elements if part.quoted else [Text(w, e.line) for e in elements for w in e.text.split()]
            return list(split), False, False
        value = self.value(part, line)
        if part.quoted:
            return [value], False, False
        words = [Text(text, value.line) for text in value.text.split()]
        return words, value.text[:1].isspace(), value.text[-1:].isspace()

    def elements(self, part: Part) -> list[Text] | None:
        """The elements that ${NAME[@]} means; None for anything else."""
        name = re.fullmatch(rf"({NAME})\[[@*]\]", part.text)
        if part.kind != "variable":
            return None
        if part.text in ("@", "*"):
            return [value for n in range(1, 10) if isinstance(value := self.variables.get(str(n)), Text)]
        if name is None:
            return None
        value = self.variables.get(name[1], [])
        return value if isinstance(value, list) else [value]

    def value(self, part: Part, line: int) -> Text:
        """The text of a variable, an arithmetic expression or something unknown."""
        if part.kind == "unknown":
            return Text(_unknown(part.text), line)
        if part.kind == "arithmetic":
            number = arithmetic(re.sub(rf"\$?\{{?({NAME}|(?<=\$)\d|(?<=\{{)\d)\}}?", self._operand, part.text))
            return Text(_unknown(f"$(({part.text}))") if number is None else str(number), line)
        if (elements := self.elements(part)) is not None:
            return Text(" ".join(element.text for element in elements), elements[0].line if elements else line)
        name, _, index = part.text.partition("[")
        value = self.variables.get(name)
        if isinstance(value, list):
            number = int(index[:-1]) if index[:-1].isdigit() and len(index) < 8 else 0
            value = value[number] if number < len(value) else None
        is_empty = value is None or (not value.text and part.operation.startswith(":"))
        if part.operation.endswith(("-", "=")) and is_empty:
            value = Text(self.joined(part.word), line)
            if part.operation.endswith("=") and re.fullmatch(NAME, part.text):
                self.variables[part.text] = value
        elif part.operation.endswith("+"):
            value = Text("" if is_empty else self.joined(part.word), line)
        if value is None:
            return Text(_unknown(f"${name}"), line)
        return value

    def _operand(self, match: re.Match[str]) -> str:
        value = self.variables.get(match[1])
        return value.text if isinstance(value, Text) else "unknown"


@dataclass(slots=True)
class _Branch:
    """An open if (or a loop that is passed over). `is_asked`: the statements that run now are its condition."""

    ends: str
    active: bool
    is_asked: bool = False
    condition: bool = False
    taken: bool = False

    def __post_init__(self) -> None:
        self.is_asked = self.ends == "fi"

    def turn(self, keyword: str) -> None:
        """then, elif or else: what runs from here on?"""
        if keyword == "then":
            self.active, self.is_asked = self.condition and not self.taken, False
            self.taken = self.taken or self.active
        else:
            self.is_asked = keyword == "elif"
            self.active, self.condition = not self.taken, False


def _inner_command(fields: list[Text]) -> str | None:
    """The command in `bash -c "..."` (behind srun and the like) and in `eval ...`."""
    texts = [text for text, _ in fields]
    if texts[0] == "eval":
        return " ".join(texts[1:])
    for number in range(len(texts) - 2):
        if texts[number].rpartition("/")[2] in ("bash", "sh") and texts[number + 1] in ("-c", "-lc"):
            return texts[number + 2]
    return None


def _statements(tokens: list[Token]) -> Iterator[tuple[list[Word], str]]:
    """Words of every statement, and the operator after it; redirections are dropped."""
    words: list[Word] = []
    in_test = redirects = False
    for token in tokens:
        if isinstance(token, Word):
            if redirects:
                redirects = False
                continue
            in_test = (in_test or token.literal == "[[") and token.literal != "]]"
            words.append(token)
        elif in_test and token.text != "\n":
            words.append(Word(token.line, [Part("text", token.text)]))
        elif token.text[0] in "<>" or token.text[:2] == "&>":
            redirects = token.text not in ("<<", "<<-")
            if words and (words[-1].literal or "").isdigit():
                words.pop()
        elif token.text not in "()":
            in_test = redirects = False
            yield words, token.text
            words = []
    yield words, ""


def _after(parts: list[Part], count: int) -> list[Part]:
    """The parts without the first `count` characters of unquoted text."""
    rest = list(parts)
    while count and rest:
        text = rest[0].text
        rest[:1] = [Part("text", text[count:])] if len(text) > count else []
        count -= min(count, len(text))
    return rest
