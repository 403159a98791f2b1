"""One tiny engine and one event loop for the tests of this folder."""

from __future__ import annotations

import pytest
from agent_world import open_agent_world


@pytest.fixture(scope="package")
def world(tmp_path_factory):
    with open_agent_world(tmp_path_factory.mktemp("model")) as opened:
        yield opened


@pytest.fixture
def template(world):
    """Sets the chat template of the world's tokenizer for one test."""
    before = world.tokenizer.chat_template

    def change(text):
        world.tokenizer.chat_template = text

    yield change
    world.tokenizer.chat_template = before
