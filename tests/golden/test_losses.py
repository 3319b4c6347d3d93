"""Numbers that must not change unseen: 20 updates of the real model at the smallest shape, in float64.

`pytest tests/golden --update-golden` writes them anew; the commit then says why they moved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_llama import llama_engine, run_plan, tiny_llama
from tests.tiny_training import accum_adamw, adamw, tiny_plan

GOLDEN = Path(__file__).with_name("losses_float64.json")
PLAN = tiny_plan(total_tokens=268, epoch_tokens=40)  # 20 updates, shortened ones at the ends of seven epochs
RUNS = {
    "adamw": (adamw(grad_clip=0.5), 0.0),
    "adamw_without_clipping": (adamw(grad_clip=None), 0.0),
    "adamw_ignored_targets": (adamw(), 0.3),
    "accum_adamw": (accum_adamw(window=3), 0.0),
}


def measured(name: str) -> dict[str, list[float]]:
    optim, ignored = RUNS[name]
    outcomes = run_plan(llama_engine(tiny_llama(), optim), PLAN, ignored=ignored)
    return {"loss": [float(o.loss) for o in outcomes], "grad_norm": [float(o.grad_norm) for o in outcomes]}


@pytest.mark.parametrize("name", RUNS)
def test_20_updates_have_the_committed_losses_and_norms(name: str, request: pytest.FixtureRequest) -> None:
    found = measured(name)
    assert len(found["loss"]) == 20
    golden: dict[str, Any] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(json.dumps(golden | {name: found}, indent=1, sort_keys=True) + "\n")
        return
    # 1e-9: sums in another order on another CPU differ by 1e-16, and 20 Adam steps amplify that.
    for key, values in golden[name].items():
        assert found[key] == pytest.approx(values, rel=1e-9), key
