import logging
import subprocess
import sys

from areal_dta.areal_fixes.loggers import task_logger


def test_without_areal_it_is_python_s(monkeypatch):
    monkeypatch.delitem(sys.modules, "areal.utils.logging", raising=False)
    assert task_logger("gsm8k") is logging.getLogger("gsm8k")


def test_with_areal_a_warning_has_the_format_that_the_launcher_shows():
    code = (
        "from areal_dta.tasks import gsm8k\n"
        "import areal.utils.logging as areal_logging\n"
        "areal_logging.getLogger('another')\n"
        "gsm8k.task_logger('gsm8k').warning('dropped 3 of 5')\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "gsm8k WARNING: dropped 3 of 5" in result.stdout, result.stderr
