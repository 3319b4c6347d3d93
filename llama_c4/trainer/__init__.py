"""Plan, engines and the one loop."""
