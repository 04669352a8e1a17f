"""Write constraints.txt: the newest versions that pyproject.toml allows, exact: a set-up that repeats.

Nothing is installed: pip resolves the development install as in an empty environment and reports what it
would take. Names and versions only, so that the file holds on any index and for any build of a package.
"""

import platform
import sys

from environments import ROOT, build_requirements, resolve


def main() -> None:
    # pip and what builds the package are part of the set-up too.
    versions = resolve([".[dev]", "pip", *build_requirements()], "--ignore-installed")
    made = f"# make constraints, Python {platform.python_version()}, {sys.platform} {platform.machine()}"
    lines = [f"{name}=={versions[name]}" for name in sorted(versions, key=str.lower)]
    (ROOT / "constraints.txt").write_text("\n".join([made, *lines, ""]), encoding="utf-8")
    print(f"constraints.txt: {len(versions)} packages")


if __name__ == "__main__":
    main()
