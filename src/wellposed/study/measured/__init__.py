"""Studies of measurements on trained weights, and the measurements that other studies take after a run."""
