"""The words of a bash script: quotes, variables, arrays and operators, each with its line. Nothing is expanded yet."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

OPERATORS = ("&&", "||", ";;", "&>>", "&>", ">>", "<<<", "<<-", "<<", ">&", "<&", ";", "|", "&", "<", ">", "(", ")")
NAME = r"[A-Za-z_]\w*"
ASSIGNMENT = re.compile(rf"({NAME})(\[\w*\])?(\+?)=")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word. `kind`: text; variable (`text` is its name, `operation` such as ":-" with its `word`);
    arithmetic (`text` is the expression); unknown (what only a running shell knows, as written)."""

    kind: str
    text: str
    quoted: bool = False
    operation: str = ""
    word: tuple[Part, ...] = ()


@dataclass(slots=True)
class Word:
    """Parts without blanks between them; `array`: the words in NAME=( ... )."""

    line: int
    parts: list[Part] = field(default_factory=list)
    array: list[Word] | None = None

    @property
    def literal(self) -> str | None:
        """The word where nothing in it is quoted or expanded: keywords are such words."""
        plain = all(part.kind == "text" and not part.quoted for part in self.parts)
        return "".join(part.text for part in self.parts) if plain and self.array is None else None


@dataclass(frozen=True, slots=True)
class Operator:
    """What ends a statement or redirects: "\\n", ";", "&&", "|", ">", ..."""

    line: int
    text: str


Token = Word | Operator


def tokens_of(text: str) -> list[Token]:
    """All words and operators; comments and here-documents are left out. Anything is accepted."""
    return _Lexer(text).tokens()


class _Lexer:
    def __init__(self, text: str, line: int = 1) -> None:
        self.text = text
        self.at = 0
        self.line = line
        self.heredocs: list[str] = []

    def tokens(self, until: str = "") -> list[Token]:
        """Tokens up to the closing bracket `until`, or to the end."""
        found: list[Token] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == until:
                self.at += 1
                break
            if char == "\n":
                found.append(Operator(self.line, "\n"))
                self.step()
                self.skip_heredocs()
            elif char in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 1
                self.step()
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif operator := next((text for text in OPERATORS if self.text.startswith(text, self.at)), None):
                found.append(Operator(self.line, operator))
                self.at += len(operator)
                if operator in ("<<", "<<-"):
                    self.heredocs.append(self.delimiter())
            else:
                found.append(self.word(until))
        return found

    def step(self) -> None:
        """Over one character, counting lines."""
        self.line += self.text.startswith("\n", self.at)
        self.at += 1

    def delimiter(self) -> str:
        match = re.compile(r"[ \t]*(['\"]?)([^\s'\"]*)\1").match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match[2] if match else ""

    def skip_heredocs(self) -> None:
        for delimiter in self.heredocs:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end].strip()
                self.at = min(end + 1, len(self.text))
                self.line += 1
                if line == delimiter:
                    break
        self.heredocs.clear()

    def word(self, until: str) -> Word:
        word = Word(self.line)
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r\n;|&<>)" or (until and char == until):
                break
            if char == "(":
                so_far = word.literal
                if so_far is None or not ASSIGNMENT.fullmatch(so_far):
                    break
                self.at += 1
                word.array = [token for token in self.tokens(")") if isinstance(token, Word)]
                break
            if self.text.startswith("\\\n", self.at):
                self.at += 1
                self.step()
            elif char == "\\":
                word.parts.append(Part("text", self.text[self.at + 1 : self.at + 2], quoted=True))
                self.at += 2
            elif char == "'":
                word.parts.append(Part("text", self.up_to("'"), quoted=True))
            elif char == '"':
                self.at += 1
                word.parts += self.quoted() or [Part("text", "", quoted=True)]
            elif char in "$`":
                word.parts.append(self.expansion(quoted=False))
            else:
                word.parts.append(Part("text", char))
                self.at += 1
        return word

    def whole(self) -> list[Part]:
        """Everything as the parts of one word, blanks too: the default in ${NAME:-default}."""
        parts: list[Part] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.at += 1
                parts += self.quoted()
            elif char == "'":
                parts.append(Part("text", self.up_to("'"), quoted=True))
            elif char in "$`":
                parts.append(self.expansion(quoted=True))
            else:
                parts.append(Part("text", char))
                self.at += 1
        return parts

    def up_to(self, quote: str) -> str:
        """The text up to the next `quote`, both quotes passed."""
        end = self.text.find(quote, self.at + 1)
        end = len(self.text) if end < 0 else end
        inside = self.text[self.at + 1 : end]
        self.line += inside.count("\n")
        self.at = end + 1
        return inside

    def quoted(self) -> list[Part]:
        """Parts up to the closing double quote."""
        parts: list[Part] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.at += 1
                break
            if self.text.startswith("\\\n", self.at):
                self.at += 1
                self.step()
            elif char == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\"):
                parts.append(Part("text", self.text[self.at + 1], quoted=True))
                self.at += 2
            elif char in "$`":
                parts.append(self.expansion(quoted=True))
            else:
                parts.append(Part("text", char, quoted=True))
                self.step()
        return parts

    def expansion(self, quoted: bool) -> Part:
        """At a $ or a backtick."""
        rest = self.text[self.at : self.at + 3]
        if rest[0] == "`":
            return Part("unknown", f"`{self.up_to('`')}`", quoted)
        if rest == "$((":
            return Part("arithmetic", self.balanced(1)[1:-1], quoted)
        if rest[:2] == "$(":
            return Part("unknown", f"$({self.balanced(1)})", quoted)
        if rest[:2] == "${":
            return _variable(self.balanced(1), quoted, self.line)
        if rest[:2] == "$'":
            self.at += 1
            return Part("text", self.up_to("'"), quoted=True)
        match = re.compile(rf"\$({NAME}|[0-9@*#?$!-])").match(self.text, self.at)
        if match is None:
            self.at += 1
            return Part("text", "$", quoted)
        self.at = match.end()
        return Part("variable", match[1], quoted)

    def balanced(self, skip: int) -> str:
        """What stands between the bracket at `at` + `skip` and its partner; both are passed."""
        start = self.at + skip
        opening = self.text[start]
        closing = {"(": ")", "{": "}"}[opening]
        depth, end = 0, start
        while end < len(self.text):
            depth += (self.text[end] == opening) - (self.text[end] == closing)
            if depth == 0:
                break
            end += 1
        inside = self.text[start + 1 : end]
        self.line += inside.count("\n")
        self.at = end + 1
        return inside


def _variable(inside: str, quoted: bool, line: int) -> Part:
    """What stands in ${...}: a name, an element of an array, a default."""
    match = re.fullmatch(rf"({NAME}|[0-9@*]+)(\[[^]]*\])?(:?[-=+?])?(.*)", inside, re.DOTALL)
    if match is None or (match[4] and not match[3]):
        return Part("unknown", f"${{{inside}}}", quoted)
    word = tuple(_Lexer(match[4], line).whole())
    return Part("variable", match[1] + (match[2] or ""), quoted, match[3] or "", word)
