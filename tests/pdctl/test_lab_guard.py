"""The tests' own deployments go down with the tests, however these end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from supervision import Home, Site, eventually

from pdctl import ops

CODE = """
import sys, time
from pathlib import Path
from lab import Lab, guarded
with guarded(Lab(Path(sys.argv[1]), Path())):
    print("guarded", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_test_run_left_is_taken_down(home: Home, site: Site) -> None:
    ops.up(site.topology(), ops.UpOptions(detach=True), ops.silent)
    tests = Path(__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", CODE, str(home.root)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{tests}:{tests.parent}"},
    ) as run:
        assert run.stdout is not None and run.stdout.readline() == b"guarded\n"
        assert len(home.processes()) == 6
        run.kill()
    eventually(lambda: home.processes() == [], 60)
    eventually(lambda: not home.dir("demo", "x").parent.exists())
