"""The tables at the door: every name leads to a function, and reading them costs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import areal.algorithm as door
from areal.utils.import_path import load_named

TABLES = {name: table for name, table in vars(door).items() if name.isupper()}


@pytest.mark.parametrize(
    ("table", "name"), [(table, name) for table, names in TABLES.items() for name in names]
)
def test_every_name_leads_to_a_function(table: str, name: str):
    assert callable(load_named(name, TABLES[table], key="test"))


def test_the_documented_names_are_there():
    assert set(door.POLICY_LOSSES) == {"ppo", "gspo", "sapo", "cispo"}
    assert set(door.KL_ESTIMATORS) == {"k1", "k2", "k3"}
    assert set(door.PREFERENCE_LOSSES) == {"sigmoid", "ipo"}


def test_an_own_function_is_given_by_import_path():
    path = "areal.algorithm.advantage.vapo_lambda"
    by_path = load_named(path, door.LAMBDA_FUNCTIONS, key="actor.gae_lambda")
    assert by_path is load_named("vapo", door.LAMBDA_FUNCTIONS, key="actor.gae_lambda")
    with pytest.raises(ValueError, match="actor.gae_lambda.*did you mean 'vapo'"):
        load_named("vapoo", door.LAMBDA_FUNCTIONS, key="actor.gae_lambda")


def test_the_door_and_the_filters_load_no_torch():
    code = "import sys, areal.algorithm.filters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=900).returncode == 0
