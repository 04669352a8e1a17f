"""The monitor as a callback of other people's trainers; each module needs the library of its name."""
