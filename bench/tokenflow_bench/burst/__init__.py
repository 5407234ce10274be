"""The paper's burst at the scale of this machine: the real engine, readers on sockets, policies in turns."""
