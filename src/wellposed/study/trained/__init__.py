"""Studies whose result is what training gives: grids of recipes."""
