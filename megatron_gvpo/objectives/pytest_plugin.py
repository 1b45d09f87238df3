"""The contract kit under pytest, in one line, for anybody's objective.

In a test file:

    test_contract = contract_test("my_package.my_module:MyObjective", {"beta": 0.1})

or on the command line, without a file:

    pytest --objective my_package.my_module:MyObjective

Both give one test for each check that applies. Nothing of the kit is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from megatron_gvpo.objectives.contract import Check, Kit


def contract_test(objective: str | type[Any], options: Mapping[str, Any] | None = None) -> Callable[..., None]:
    """A parametrised test function, one case a check. objective: a class, a known name, or `module:Class`."""
    checks, kit = _checks(objective, options)

    @pytest.mark.parametrize("check", checks, ids=[c.name for c in checks])
    def test(check: Check) -> None:
        from megatron_gvpo.objectives.contract import run_check

        run_check(check, kit)

    return test


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megatron-gvpo")
    group.addoption(
        "--objective",
        action="append",
        default=[],
        metavar="NAME",
        help="run the contract kit on this objective: a known name or module:Class (may be given several times)",
    )


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    for name in config.getoption("--objective") or []:
        try:
            checks, kit = _checks(name, None)
        except ValueError as error:
            raise pytest.UsageError(f"--objective {name}: {error}") from None
        items += [ContractItem.from_parent(session, name=f"{name}::{c.name}", check=c, kit=kit) for c in checks]


class ContractItem(pytest.Item):
    """One check of one objective that the command line names."""

    def __init__(self, *, check: Check, kit: Kit, **parent: Any) -> None:
        super().__init__(**parent)
        self.check, self.kit = check, kit

    def runtest(self) -> None:
        from megatron_gvpo.objectives.contract import run_check

        run_check(self.check, self.kit)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from megatron_gvpo.objectives.contract import ContractError

        return str(excinfo.value) if isinstance(excinfo.value, ContractError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, int | None, str]:
        return "contract", None, self.name


def _checks(objective: str | type[Any], options: Mapping[str, Any] | None) -> tuple[Sequence[Check], Kit]:
    from megatron_gvpo.objectives.contract import CHECKS, Kit
    from megatron_gvpo.objectives.registry import load_objective

    kit = Kit(load_objective(objective) if isinstance(objective, str) else objective, options)
    return [c for c in CHECKS if c.applies(kit)], kit
