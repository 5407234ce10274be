"""An engine, its memory, copies and readers in discrete events; it executes the policies that ship."""

from tokenflow_bench.simulator.run import Outcome, Part, Sample, simulate

__all__ = ["Outcome", "Part", "Sample", "simulate"]
