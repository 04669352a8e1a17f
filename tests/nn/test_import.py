"""What importing the functions costs."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("unwanted", ["torch._dynamo", "triton", "scipy", "wellposed.linalg.hopper"])
def test_what_is_not_needed_is_not_imported(unwanted) -> None:
    # The kernels are for a Hopper GPU: a call on a CPU leaves them alone too.
    code = (
        "import sys, torch, wellposed.nn.functional as f;"
        "f.gray(torch.randn(1, 3, 5)); "
        f"sys.exit({unwanted!r} in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
