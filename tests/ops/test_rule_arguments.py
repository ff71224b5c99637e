"""Every argument of every op in the table is one that its rule was tried with: an argument that a
rule ignores may change what is right, as `scale_grad_by_freq` of an embedding does.
"""

from __future__ import annotations

from typing import Any

from autopar.ir.sharding_rule import TABLE
from rule_cases import CASES, GENERATED
from shards import Case

# Of no account to how an op may be split: where and as what type entries are made.
ELSEWHERE = {
    "layout", "device", "pin_memory", "memory_format", "non_blocking", "copy", "implicit",
    "cudnn_enable", "cudnn_enabled",
}  # fmt: skip
# What no case can give: taken out before there are rules (simplify), or half types on a GPU alone.
NEVER = {
    ("aten.embedding.default", "sparse"), ("aten.embedding_bag.padding_idx", "sparse"),
    ("aten.gather.default", "sparse_grad"),
    ("aten._softmax.default", "half_to_float"), ("aten._log_softmax.default", "half_to_float"),
}  # fmt: skip


def argument_names(case: Case) -> set[str]:
    """The arguments of a case that have another value than their default."""
    names = set()
    for place, argument in enumerate(case.target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else ...
        value: Any = case.kwargs.get(argument.name, ...)
        if place < len(case.args) and not argument.kwarg_only:
            value = case.args[place]
        if value is not ... and (default is ... or value != default):
            names.add(argument.name)
    return names


def wanted(target: Any) -> set[str]:
    arguments = target._schema.arguments
    names = {a.name for a in arguments if "Tensor" not in str(a.type)}
    return {n for n in names - ELSEWHERE if (str(target), n) not in NEVER}


def test_every_argument_of_a_rule_has_a_case_with_another_value_than_its_default() -> None:
    tried: dict[Any, set[str]] = {}
    for case in (*CASES, *GENERATED):
        tried.setdefault(case.target, set()).update(argument_names(case))
    missing = {str(t): sorted(wanted(t) - tried.get(t, set())) for t in TABLE}
    assert not {t: names for t, names in missing.items() if names}
