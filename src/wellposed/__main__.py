"""``python -m wellposed``, which is also how launchers such as torchrun start it."""

from wellposed.cli import app

if __name__ == "__main__":
    app(prog_name="wellposed")
