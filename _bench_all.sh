export PYTHONUNBUFFERED=1 PYTHONPATH=src
python _spec_bench.py 2>&1 | head -40
python benchmarks/diagnose.py --out $OUT/diagnose-h200.csv 2>&1 | cut -c1-600
