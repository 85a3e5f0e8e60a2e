"""Training on verl's Ray workers: the one place that knows verl."""
