"""The shape of a line, colour, rank, quiet, files, and who prints when the root is configured."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from areal.utils import logging


def run_python(code: str, **env: str) -> str:
    """Standard error of a fresh interpreter, where nobody configured the root logger."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "AREAL_LOG_LEVEL")}
    done = subprocess.run(
        [sys.executable, "-c", f"from areal.utils import logging\n{code}"],
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=900,
    )
    return done.stderr


def test_line_names_the_component_and_hides_info_level():
    text = run_python(
        "log = logging.getLogger('PartOne')\nlog.info('hello %d', 3)\nlog.warning('careful')\n"
        "log.debug('unseen')"
    )
    first, second = text.splitlines()
    assert first[2] == first[5] == ":" and first[8:] == " [PartOne] hello 3"
    assert second.endswith("[PartOne] WARNING: careful")


def test_rank_and_level_come_from_the_environment():
    text = run_python(
        "logging.getLogger('PartOne').debug('seen')", RANK="3", AREAL_LOG_LEVEL="debug"
    )
    assert "[PartOne Rank 3] DEBUG: seen" in text


def test_unknown_level_is_one_clear_error():
    text = run_python("logging.getLogger('PartOne')", AREAL_LOG_LEVEL="LOUD")
    assert "AREAL_LOG_LEVEL=LOUD: unknown level" in text


def test_traceback_follows_the_message():
    text = run_python(
        "log = logging.getLogger('PartOne')\n"
        "try: 1/0\nexcept ZeroDivisionError: log.exception('bad')"
    )
    assert "[PartOne] ERROR: bad\nTraceback" in text
    assert text.endswith("ZeroDivisionError: division by zero\n")


def test_quiet_holds_back_information_only_inside_the_block():
    text = run_python(
        "log = logging.getLogger('PartOne')\n"
        "with logging.quiet():\n  log.info('in')\n  log.warning('loud')\n"
        "log.info('out')"
    )
    assert [line.split()[-1] for line in text.splitlines()] == ["loud", "out"]


def test_configured_root_takes_over():
    text = run_python(
        "import logging as std\nstd.basicConfig(format='mine %(message)s', level='INFO')\n"
        "logging.getLogger('PartOne').info('once')"
    )
    assert text == "mine once\n"


def test_level_chosen_before_the_first_logger_stays():
    text = run_python(
        "import logging as std\nstd.getLogger('areal').setLevel('WARNING')\n"
        "logging.getLogger('PartOne').info('unseen')"
    )
    assert text == ""


def test_colour_on_a_terminal_only(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    logging.register_color("PaintedPart", "cyan")
    monkeypatch.setattr(sys, "stderr", Terminal())
    handler = logging._install_handler()
    record = logging.getLogger("PaintedPart").makeRecord(
        "areal.PaintedPart", logging.ERROR, "", 0, "text", (), None
    )
    assert "\033[36m[PaintedPart]\033[0m \033[31mERROR: \033[0mtext" in handler.format(record)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert "\033" not in handler.format(record)


def test_file_gets_dated_lines_while_open(tmp_path):
    logger = logging.getLogger("PartTwo")
    with logging.log_to_file(tmp_path / "logs" / "main.log"):
        logging.set_rank(1)
        logger.info("kept")
        logging.set_rank(None)
    logger.info("gone")
    text = (tmp_path / "logs" / "main.log").read_text()
    assert text.count("\n") == 1
    assert text.startswith("20") and text.endswith("[PartTwo Rank 1] kept\n")


def test_bad_names_are_refused():
    with pytest.raises(ValueError, match="PascalCase"):
        logging.getLogger("areal.run.checkpoints")
    with pytest.raises(ValueError, match="unknown colour 'pink'"):
        logging.register_color("PartOne", "pink")


def test_with_a_log_file_the_traceback_goes_there_and_the_console_keeps_one_line(tmp_path):
    code = (
        "log = logging.getLogger('PartOne')\n"
        f"with logging.log_to_file({str(tmp_path / 'main.log')!r}):\n"
        "  try: 1/0\n  except ZeroDivisionError: log.exception('bad')"
    )
    (line,) = run_python(code, AREAL_DEBUG="").splitlines()
    assert line.endswith("[PartOne] ERROR: bad: ZeroDivisionError: division by zero")
    assert "ERROR: bad\nTraceback" in (tmp_path / "main.log").read_text()
    assert "Traceback" in run_python(code, AREAL_DEBUG="1")


def test_half_a_character_is_no_logging_error(tmp_path):
    text = run_python(
        f"with logging.log_to_file({str(tmp_path / 'log')!r}):\n"
        "    logging.getLogger('PartOne').warning('it said %s', chr(0xD83D))\n"
        "    try: raise ValueError(chr(0xDC00))\n"
        "    except ValueError: logging.getLogger('PartOne').exception('and')\n"
    )
    assert "Logging error" not in text
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert "it said \ufffd" in log and "ValueError: \ufffd" in log
