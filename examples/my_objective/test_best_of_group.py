"""The contract of every objective, in one line: masks, empty responses, order, every split into micro-batches and ranks."""

from megatron_gvpo.objectives.pytest_plugin import contract_test

test_contract = contract_test("best_of_group:BestOfGroup", {"margin": 0.1})
