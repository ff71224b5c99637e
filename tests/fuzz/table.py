"""The table of op kinds: each is a small text, of which a module's source is put together.

    op("glu", "F.glu(self.{m}({x}), -1)", init="self.{m} = nn.Linear({h}, 2 * {o})")

`text` is what forward does: lines, the last one an expression whose value the next ops may take.
What stands in braces is Python, evaluated in `Fields` of source.py: `x` the name of the value that
the op takes, `shape` its sizes, `b`, `c` and `h` the first, second and last of them, `n` how many,
`m` the op's own module name, `o` a random width, `y` another value of the same shape, `flag`,
`dim`, `pick(...)`, `divisor(k)`: draws, and `given("torch.rand(3)")` one more input of the module.
"""

from __future__ import annotations

from dataclasses import dataclass

FROM_IDS, OP, LOSS, RETURN = "from ids", "op", "loss", "return"


@dataclass(frozen=True)
class Op:
    """One kind. `when`: what its value must be like, `define`: what the module's source needs
    before the class, `kind`: where a case may have it. `loose`: its numbers have float32's
    precision or less. `weight`: how often it is drawn, next to others.
    """

    name: str
    text: str
    init: str = ""
    when: str = "True"
    define: str = ""
    kind: str = OP
    loose: bool = False
    weight: float = 1.0


TABLE: dict[str, Op] = {}


def op(name: str, text: str, **more: object) -> None:
    assert name not in TABLE, name
    TABLE[name] = Op(name, text, **more)  # type: ignore[arg-type]


def ops(when: str = "True", **texts: str) -> None:
    """Several kinds that need nothing but their text."""
    for name, text in texts.items():
        op(name, text, when=when)


def names(kind: str) -> list[str]:
    return [name for name, entry in TABLE.items() if entry.kind == kind]
