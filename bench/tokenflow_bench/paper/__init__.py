"""`make paper`: the set-ups of TokenFlow's paper and what lies beyond it, in simulation."""
