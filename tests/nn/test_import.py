"""What importing the functions costs."""

import subprocess
import sys


def test_the_compiler_is_not_imported() -> None:
    code = "import sys, wellposed.nn.functional; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
