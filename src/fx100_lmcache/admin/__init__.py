"""What operators ask of a volume: inspect, verify, advice. Used by commands and doctor."""
