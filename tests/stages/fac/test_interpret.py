"""What the stage makes of its settings before a judge is asked; `tests/flows/test_fac_judge.py` runs it whole."""

from __future__ import annotations

from headwater.llm.registry import EngineConfig
from headwater.stages.fac.interpret import Interpret, InterpretConfig


def test_as_many_features_are_in_work_as_the_judge_takes_calls_whatever_the_measured_model_says() -> None:
    judge = EngineConfig(engine="openai", model="judge", base_url="http://127.0.0.1:1/v1", max_concurrency=200)
    measured = EngineConfig(max_concurrency=1_000)

    assert Interpret(InterpretConfig(engine=judge, model=measured)).concurrency == 200
