"""What is timed and how right it is, with the scripts of the pictures; results are in ``results/``.

``python -m benchmarks`` lists them, ``python -m benchmarks NAME`` runs one. They are not in the wheel.
"""
